"""The trainer that DPO and KTO share: scoring answers with a reference policy."""

import hashlib
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from datasets import Dataset, IterableDataset
from datasets import config as cache
from torch import nn
from torch.utils.data import DataLoader

from ...algorithms.preferences import PreferenceAlgorithm
from ...batch import Step
from ...data.cutting import Cut
from ...data.encode import TextEncoder
from ...data.examples import RowReader, answers_of, token_counts
from ...data.packing import MicroBatchSampler
from ...data.preference_cutting import with_ref_logps
from ...data.preference_rows import Learner
from ...data.streams import PreparedStream
from ...models.patches import attention_implementation
from ...models.reference import FrozenCopy, ReferencePolicy, whole_weights
from ...models.unwrap import causal_model
from ...types import Mode
from ..attributes import PREFERENCE_OPTIONS, PREFERENCE_PROPERTIES, add_trl_properties
from ..base.annotate import Annotator
from ..uncalled import OFFLINE, PREFERENCE
from .batches import prepare_answers
from .offline_config import PreferenceConfig
from .offline_trainer import OfflineTrainer, RawDataset

READ_AT_ONCE = 1000  # rows of a dataset
VERSION = 2  # of files of precomputed log-probabilities, changed with what is stored


@add_trl_properties(PREFERENCE_OPTIONS, PREFERENCE_PROPERTIES)
class PreferenceTrainer(OfflineTrainer):
    """Trains on answers to prompts, which the reference scores before each step.

    `ref_model` is the reference, by name or loaded. None: a frozen copy of the model, or the model
    without its adapter. The other arguments are those of `OfflineTrainer`, in its order.
    """

    args: PreferenceConfig
    algorithm: PreferenceAlgorithm
    learner: ClassVar[Learner]
    uncalled_methods = OFFLINE | PREFERENCE
    train_dataset: Any
    unpairs: ClassVar[bool] = False  # whether a pair becomes two answers with a label
    _reference_released = False  # once it is not needed any more

    def __init__(
        self,
        model: str | nn.Module,
        ref_model: str | nn.Module | None = None,
        args: PreferenceConfig | None = None,
        *other_args: Any,
        **other_kwargs: Any,
    ):
        super().__init__(model, args, *other_args, **other_kwargs)
        # Forward passes may communicate, so a rank cannot repeat one alone after an error.
        self._scoring = self.phases.adaptive("scoring", alone=self.ranks.count > 1)
        if self.args.needs_reference:
            self._make_reference(ref_model, model)

    def prepare_dataset(
        self, dataset: RawDataset, encoder: TextEncoder, args: PreferenceConfig, mode: Mode
    ) -> Dataset | PreparedStream:
        """Tokenize prompts with their answers, and cut them to length."""
        answers = self.cut_answers(dataset, encoder, args, mode)
        return answers if isinstance(answers, PreparedStream) else answers.checked(str(args.limits))

    def cut_answers(
        self, dataset: RawDataset, encoder: TextEncoder, args: PreferenceConfig, mode: Mode
    ) -> Cut | PreparedStream:
        """Tokenize prompts with their answers, and choose the ranges that are left of them."""
        option = "precompute_ref_log_probs=True"
        if args.precompute_ref_log_probs and self._reference_released:
            raise ValueError(
                f"{option}: the reference is not kept while training, so only datasets that were "
                "passed to the trainer can be evaluated."
            )
        if args.precompute_ref_log_probs and isinstance(dataset, IterableDataset):
            raise ValueError(
                f"{option} needs datasets of known length, but {mode}_dataset is a stream."
            )
        return prepare_answers(dataset, encoder, args, args.limits, self.unpairs, self.learner)

    def begin_training(self) -> None:
        """Score all answers with the reference if that is asked for, and release its weights."""
        if self.reference is None or not self.args.precompute_ref_log_probs:
            return
        # Not before: a policy that is sharded cannot score until it is prepared for training.
        self._precompute(self.reference)
        if isinstance(self.reference, FrozenCopy):
            self.reference = None
            self._reference_released = True

    def _precompute(self, reference: ReferencePolicy) -> None:
        with reference.active(self.model) as model:
            weights = _digest_of_weights(reference)
            score = partial(self._with_ref_logps, model=model, weights=weights)
            self.replace_train_dataset(score(self.train_dataset))
            evaluation = self._prepared(self.eval_dataset, self.args)
            if isinstance(evaluation, Mapping):
                evaluation = {name: score(dataset) for name, dataset in evaluation.items()}
            elif evaluation is not None:
                evaluation = score(evaluation)
            self.eval_dataset = evaluation
        self.remember_datasets()

    def _with_ref_logps(
        self, dataset: Dataset, model: nn.Module, weights: "hashlib._Hash"
    ) -> Dataset:
        """Add log-probabilities of answers to a dataset: from the cache on disk, or computed."""
        args = self.args
        rows = args.precompute_ref_batch_size or args.per_device_train_batch_size
        limits = rows, args.max_tokens_per_micro_batch
        key = _key(weights, [limits, scoring_facts(args, model)], dataset)
        path = Path(cache.HF_DATASETS_CACHE, "trl", f"reference-{key}.npy")
        # Only rank 0 looks: ranks on other machines may have other disks.
        stored = _read(path) if self.ranks.rank == 0 else None
        logps = self.ranks.gather_objects(stored)[0]
        if logps is None:
            logps = self._scored(dataset, model, limits)
            if self.ranks.rank == 0:
                _write(path, logps)
        return with_ref_logps(dataset, logps, key)

    def _scored(
        self, dataset: Dataset, model: nn.Module, limits: tuple[int, int | None]
    ) -> np.ndarray:
        """Compute log-probabilities (rows, K) of answers; each rank scores a shard of the rows."""
        local = []
        batches = MicroBatchSampler(token_counts(dataset), *limits, place=self.ranks.data_shard)
        reader = RowReader(dataset)
        annotator = self.annotator
        for batch in DataLoader(reader, batch_sampler=batches, collate_fn=self.collate):
            self._agree_on(batch, model)
            batch = batch.to(self.args.device)
            with self.phases("scoring"):
                token_logps = annotator.logps(model, batch)
            logps = batch.by_group(self.algorithm.answer_logps(token_logps, batch))
            local.append(logps[batch.group_mask].cpu())
        all_ranks = self.ranks.gather_objects(local)[:: self.ranks.per_row]
        # Ranks took micro-batches in turn, see `share_of_rank`.
        in_order = [logps for turn in zip(*all_ranks, strict=True) for logps in turn]
        return torch.cat(in_order).numpy()

    @property
    def annotator(self) -> Annotator:
        """Make the annotator, which scores without gradient in the chunks of training."""
        return Annotator(
            policy=lambda: self.model,
            scorer=self.scorer,
            guard=self.guard,
            chunks=self.runner.chunks,
            size=self._scoring,
            autocast=self.accelerator.autocast,
            reference=self.reference,
        )

    def annotate(self, step: Step) -> Step:
        """Add the log-probabilities that the algorithm needs to the batches of a step."""
        with self.phases("scoring"):
            return self.annotator(step, self.algorithm.needs)


def scoring_facts(args: PreferenceConfig, model: nn.Module) -> dict[str, object]:
    """Return what log-probabilities depend on, besides the tokens and the model's weights."""
    config = causal_model(model).config
    return {
        "attention": attention_implementation(config),
        "bf16": args.bf16,
        "config": config.to_json_string(),
        "device": args.device.type,
        "fp16": args.fp16,
        "ld_alpha": getattr(args, "ld_alpha", None),  # DPO has it
        "logits_chunk_size": args.logits_chunk_size,
        "pad_to_multiple_of": args.pad_to_multiple_of,
        "piece_tokens": args.piece_tokens,
        "shared_prefix": args.shared_prefix,
    }


def _digest_of_weights(reference: ReferencePolicy) -> "hashlib._Hash":
    """Digest the weights of the reference; all ranks call this, because weights are gathered."""
    digest = hashlib.sha256()
    trained_adapter = getattr(reference.model, "active_adapter", None)
    for name, weight in whole_weights(reference.model):
        if trained_adapter is None or trained_adapter not in name.split("."):
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
            digest.update(weight.contiguous().flatten().view(torch.uint8).numpy())
    return digest


def _key(weights: "hashlib._Hash", facts: list[object], dataset: Dataset) -> str:
    """Return a digest of weights, facts, versions and tokens: equal keys, equal results."""
    digest = weights.copy()
    versions = [VERSION, torch.__version__, transformers.__version__]
    digest.update(json.dumps([versions, *facts], sort_keys=True, default=str).encode())
    reader = RowReader(dataset)
    for start in range(0, len(dataset), READ_AT_ONCE):
        rows = range(start, min(start + READ_AT_ONCE, len(dataset)))
        for example in reader.__getitems__(list(rows)):
            for ids in (example["prompt_ids"], *answers_of(example)):
                digest.update(np.array([len(ids), *ids], dtype=np.int32).tobytes())
    return digest.hexdigest()[:32]


def _read(path: Path) -> np.ndarray | None:
    """Load an array; None if the file is missing or damaged."""
    try:
        return np.load(path)
    except (OSError, ValueError, EOFError):
        return None


def _write(path: Path, values: np.ndarray) -> None:
    """Save an array under another name, then rename it, so no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(f".{os.getpid()}.tmp")
    with staged.open("wb") as file:
        np.save(file, values)
    staged.replace(path)
