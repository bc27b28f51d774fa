"""Log-probabilities of a reference, computed once for a dataset and kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ...data.packing import MicroBatchSampler
from ...distributed import Ranks
from ...models.reference import ReferencePolicy, whole_weights
from ...models.unwrap import causal_model
from ...types import Mode
from .batches import RankBatches
from .offline_config import PreferenceConfig

VERSION = 2  # changed with what is stored


@dataclass(frozen=True, kw_only=True)
class Precomputation:
    """Fills prepared datasets with the `ref_logps` (items, K) of their answers.

    What is found under a key of everything the numbers depend on is not computed again: the tokens
    of all items, all weights of the reference, and `facts`.
    """

    ranks: Ranks  # each computes its share
    collate: Callable[[list[Any]], Any]
    score: Callable[[Any], Tensor]  # log-probabilities (B, K) of rows
    limits: tuple[int, int | None]  # rows, and at most tokens, of what is scored at once
    facts: dict[str, Any]  # what else the numbers depend on, by name

    def fill(self, dataset: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Compute or read the numbers of prepared items, by the whole weights of the reference.

        Every rank must call this.
        """
        key, is_first = hashlib.sha256(), self.ranks.rank == 0
        for name, weight in weights:  # ranks gather them together, though one alone reads them
            if is_first:
                key.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
                key.update(weight.contiguous().flatten().view(torch.uint8).numpy())
        path = self._path(key, dataset) if is_first else None
        found = self.ranks.gather_objects(None if path is None else _read(path))[0]
        if found is None:
            found = self._compute(dataset)
            if path is not None:
                _write(path, found)
        dataset.values["ref_logps"] = found

    def _path(self, key: Any, dataset: Any) -> Path:
        """The file for a key of the weights, to which all else is added."""
        versions = [VERSION, torch.__version__, transformers.__version__]
        facts = [versions, self.limits, self.facts]
        key.update(json.dumps(facts, sort_keys=True, default=str).encode())
        for item in map(dataset.__getitem__, range(len(dataset))):
            for ids in (item.prompt_ids, *item.answer_ids):
                key.update(np.array([len(ids), *ids], dtype=np.int32).tobytes())
        name = f"reference-{key.hexdigest()[:32]}.npy"
        return Path(datasets.config.HF_DATASETS_CACHE) / "trl" / name

    def _compute(self, dataset: Any) -> np.ndarray:
        order = MicroBatchSampler(dataset.lengths, *self.limits)
        batches = RankBatches(order, *self.ranks.place)
        mine = []
        for rows in DataLoader(dataset, batch_sampler=batches, collate_fn=self.collate):
            mine.append(self.score(rows).cpu()[rows.values["counts"]])
        shares = self.ranks.gather_objects(mine)[:: self.ranks.per_row]
        return in_order(shares).numpy()


def check_known(dataset: Any, mode: Mode, args: PreferenceConfig, has_let_go: bool) -> None:
    """Refuse a dataset for which nothing can be computed beforehand.

    Raises:
        ValueError: for a stream, and for any when the reference is not there any more.
    """
    if not args.precompute_ref_log_probs:
        return
    if has_let_go:
        raise ValueError(
            "precompute_ref_log_probs=True: the reference is not kept while training, so only "
            "evaluation sets that were passed to the trainer can be evaluated."
        )
    if isinstance(dataset, datasets.IterableDataset):
        raise ValueError(
            f"precompute_ref_log_probs=True needs datasets of known length, but {mode}_dataset is "
            "a stream."
        )


def scoring_facts(args: PreferenceConfig, model: nn.Module) -> dict[str, Any]:
    """What log-probabilities under a model depend on, besides its weights and the tokens."""
    config = causal_model(model).config
    names = ["bf16", "fp16", "shared_prefix", "logits_chunk_size", "pad_to_multiple_of"]
    names += ["ld_alpha", "piece_tokens"]
    options = {name: getattr(args, name, None) for name in names}
    computed = {"attention": config._attn_implementation, "device": args.device.type}
    return options | computed | {"config": config.to_json_string()}


def reference_weights(reference: ReferencePolicy) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors of all that a reference computes with; all ranks go on alike."""
    trained = getattr(reference.model, "active_adapter", None)
    for name, weight in whole_weights(reference.model):
        if trained is None or trained not in name.split("."):
            yield name, weight


def in_order(found: list[list[Tensor]]) -> Tensor:
    """Join what each rank made of its micro-batches, dealt by `share_of_rank`: (items, ...)."""
    return torch.cat([part for turn in zip(*found, strict=True) for part in turn])


def _read(path: Path) -> np.ndarray | None:
    try:
        return np.load(path)
    except (OSError, ValueError, EOFError):  # none, or damaged
        return None


def _write(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(f".{os.getpid()}.tmp")
    with staged.open("wb") as file:
        np.save(file, values)
    staged.replace(path)
