"""One training step for every trainer that learns from the examples of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from ...data.answer_rows import AnswerRows
from ...data.encode import TextEncoder
from ...data.packing import MicroBatchSampler
from ...models.readers import Reader
from ...models.reference import AdapterOff, FrozenCopy, ReferencePolicy
from ...ops.support import Support
from ...types import Mode, TokenScores
from ..attributes import readable
from ..base.base_trainer import BaseTrainer
from ..base.policy import check_dataset, checked_args, prepare_policy
from .answers import Predictions
from .batches import ItemStream, RankBatches, StreamBatches
from .offline_config import NO_LOGITS, UNSUPPORTED, OfflineConfig, PreferenceConfig
from .precomputed import Precomputation, check_known, reference_weights, scoring_facts
from .template import set_template


@readable
class OfflineTrainer(BaseTrainer):
    """The skeleton: preparing datasets, micro-batches, totals of a step, evaluation.

    An algorithm is a subclass that says how a dataset becomes items (`prepare_dataset`), items
    the rows of a micro-batch (`collate`), and scores of rows a loss (`loss_of`).

    Args:
        model (`str` or `PreTrainedModel`): what is trained, by name or already loaded.
        args (`OfflineConfig`, *optional*): options.
        train_dataset (`Dataset` or `IterableDataset`): examples.
        eval_dataset (*optional*): the same for evaluation, or a dictionary of datasets.
        processing_class (*optional*): the tokenizer. None: loaded with the model.
        callbacks (`list[TrainerCallback]`, *optional*): additional callbacks.
        optimizers (`tuple`): optimizer and scheduler, as in `transformers.Trainer`.
        quantization_config (*optional*): how to quantize a model given by name.
        peft_config (`peft.PeftConfig`, *optional*): train an adapter instead of all weights.
        ref_model (*optional*): the reference, by name or loaded. None: a frozen copy of the model,
            or the model without its adapter. Only for trainers that have one.
        options: further arguments of `transformers.Trainer`.
    """

    config_class: ClassVar[type[OfflineConfig]]
    rows_class: ClassVar[Any] = AnswerRows  # made of prepared items, for a micro-batch
    _predictions: Predictions | None = None  # while there is something to predict
    _has_let_go = False  # of the reference

    def __init__(
        self,
        model: str | nn.Module,
        args: OfflineConfig | None,
        train_dataset: Dataset | IterableDataset | None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        ref_model: Any = None,
        **options: Any,
    ):
        for name, reason in UNSUPPORTED.items():
            if options.pop(name, None) is not None:
                raise ValueError(f"{name} cannot be used: {reason}. Leave it out.")
        args = checked_args(model, args, self.config_class, self.method.name)
        if train_dataset is None:
            raise ValueError("train_dataset is required.")
        check_dataset("train_dataset", train_dataset)
        if isinstance(train_dataset, IterableDataset) and args.max_steps <= 0:
            raise ValueError("An iterable train_dataset has no length: set max_steps above 0.")
        policy = prepare_policy(
            *(model, args, processing_class, quantization_config, peft_config),
            change=partial(set_template, args=args),
        )
        self._encoder = TextEncoder(policy.tokenizer)
        with args.main_process_first(desc="tokenizing"):
            train = self._prepared(train_dataset, args, "train")
            evaluation = self._prepared(eval_dataset, args)
        super().__init__(
            policy,
            args,
            data_collator=list,
            train_dataset=train,
            eval_dataset=evaluation,
            callbacks=callbacks,
            optimizers=optimizers,
            **options,
        )
        self._order: RankBatches | StreamBatches | None = None
        self._tokens: Tensor | int = 0  # of the update that is being computed, on all ranks
        self._make_scorer()
        if self.ranks.per_row > 1:
            from ...models.context_parallel import ContextParallel, check_divisible

            check_divisible(self.model, self.ranks.per_row, args.max_length)
            self.scorer.context = ContextParallel(self.ranks.row_group)
        # Ranks take part in each other's passes, so none of them can repeat one alone.
        self._scoring = self.phases.adaptive("scoring", alone=self.ranks.count > 1)
        if isinstance(args, PreferenceConfig) and args.needs_reference:
            self._make_reference(policy.brought_adapter, ref_model, model)
            self._precompute(FrozenCopy)

    def begin_training(self) -> None:
        """Compute what is wanted beforehand, and let go of a model that is not needed for more."""
        if self.reference is None or not self.args.precompute_ref_log_probs:
            return
        # By now the policy is prepared for training, as it must be where it is sharded.
        self._precompute(AdapterOff)
        if isinstance(self.reference, FrozenCopy):
            self.reference, self._has_let_go = None, True

    def _precompute(self, kind: type[ReferencePolicy]) -> None:
        """Score all datasets with a reference of some kind, if that is wanted."""
        args, others, reference = self.args, self.eval_dataset, self.reference
        if not args.precompute_ref_log_probs or not isinstance(reference, kind):
            return
        with reference.active(self.model) as model:

            def score(rows: Any) -> Tensor:
                self._agree_on(rows, model)
                return self.frozen(model, rows.to(args.device), self.answer_logps)

            rows = args.precompute_ref_batch_size or args.per_device_train_batch_size
            work = Precomputation(
                ranks=self.ranks,
                collate=self.collate,
                score=score,
                limits=(rows, args.max_tokens_per_micro_batch),
                facts=scoring_facts(args, model),
            )
            found = others.values() if isinstance(others, Mapping) else [others]
            for dataset in (self.train_dataset, *(x for x in found if x is not None)):
                work.fill(dataset, reference_weights(reference))

    # --- What an algorithm says ---

    def prepare_dataset(self, dataset: Any, encoder: TextEncoder, args: Any, mode: Mode) -> Any:
        """Turn a dataset into prepared items, or a stream into an `ItemStream`.

        The trainer is not set up yet when its own datasets are prepared.
        """
        raise NotImplementedError

    def collate(self, items: Sequence[Any]) -> Any:
        """Make the rows of a micro-batch of prepared items."""
        return self.rows_class.of(items)

    @property
    def shares_prompts(self) -> bool:
        """Whether prompts are computed once for their answers, unless a check still fails."""
        return self.scorer.check.enabled

    def reader(self, model: nn.Module) -> Reader:
        """What reads the hidden states of rows, for ranks to agree on their layout."""
        return self.scorer.token_reader(model)

    def read(self, model: nn.Module, rows: Any, reader: Reader) -> Tensor:
        """What a reader finds in the rows of a micro-batch, with gradient."""
        ((found, *_),), _ = self.scorer.read(model, rows.flat, [reader])
        return torch.as_tensor(found)

    def score(self, model: nn.Module, rows: Any, support: Support | None = None) -> Any:
        """Compute what the loss of the rows of a micro-batch depends on, with gradient."""
        scores = self.scorer(model, rows.flat, self.logs_next(rows.mode), support)
        self.guard.watch("log-probability", scores.logps, rows.flat)
        return scores

    def score_with_others(
        self, model: nn.Module, rows: Any, others: Any
    ) -> tuple[TokenScores, Tensor]:
        """As `score`, with log-probabilities (B, K), without gradient, of others to the prompts."""
        logs = self.logs_next(rows.mode)
        scores, logps = self.scorer.with_others(model, rows.flat, others.flat, logs)
        self.guard.watch("log-probability", scores.logps, rows.flat)
        return scores, others.by_group(logps.sum(1))

    def loss_of(self, scores: Any, rows: Any) -> Tensor:
        """Return the sum of the losses of some rows (k,); the totals of the step divide it.

        Metrics go to `self.metrics[rows.mode]`.
        """
        raise NotImplementedError

    def weigh(self, rows: Any) -> Tensor:
        """Say what the sums of `loss_of` (k,) are divided by, once it is added up over a step."""
        return rows.weight()

    def before_step(self, batches: list[Any]) -> list[Any]:
        """Add to the micro-batches of an optimizer step what is computed without gradient.

        Each knows `totals` and is on the device; an evaluation batch is a step of its own.
        """
        if self.reference is None:
            return batches
        return [self.with_reference(rows) for rows in batches]

    def pack_size(self, mode: Mode) -> int | None:
        """Tokens of a pack of items that counts as one row of a micro-batch; None: no packs."""
        return None

    # --- Data ---

    def _prepared(self, dataset: Any, args: OfflineConfig, mode: Mode = "eval") -> Any:
        """Prepare a dataset, or a dictionary of evaluation sets; what is prepared stays."""
        if isinstance(dataset, Mapping):
            return {name: self._prepared(one, args) for name, one in dataset.items()} or None
        if dataset is None or hasattr(dataset, "rows"):
            return dataset
        check_dataset(f"{mode}_dataset", dataset)
        check_known(dataset, mode, args, self._has_let_go)
        found = self.prepare_dataset(dataset, self._encoder, args, mode)
        if isinstance(found, ItemStream) and args.shuffle_dataset and mode == "train":
            found.shuffle(args.seed)
        return found

    def _loader(self, dataset: Any, mode: Mode) -> tuple[DataLoader[Any], Any]:
        """A loader of this rank's micro-batches, and what decides their order."""
        args, place = self.args, self.ranks.place
        is_training = mode == "train"
        rows = args.per_device_train_batch_size if is_training else args.per_device_eval_batch_size
        limits = rows, args.max_tokens_per_micro_batch, self.pack_size(mode)
        workers: dict[str, Any] = {"num_workers": args.dataloader_num_workers}
        if args.dataloader_num_workers:
            workers["prefetch_factor"] = args.dataloader_prefetch_factor
            workers["persistent_workers"] = args.dataloader_persistent_workers
        shared = workers | {"collate_fn": self.collate, "pin_memory": args.dataloader_pin_memory}
        if isinstance(dataset, ItemStream):
            stream = StreamBatches(dataset, *limits, place)
            return DataLoader(stream, batch_size=None, **shared), stream
        seed = args.order_seed if is_training else None
        order = RankBatches(MicroBatchSampler(dataset.lengths, *limits, seed), *place)
        return DataLoader(dataset, batch_sampler=order, **shared), order

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of this rank's micro-batches."""
        loader, self._order = self._loader(self.train_dataset, "train")
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return a loader of this rank's micro-batches of an evaluation set, raw or prepared."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        elif eval_dataset is None:
            eval_dataset = self.eval_dataset
        return self._loader(self._prepared(eval_dataset, self.args), "eval")[0]

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the loader of `predict`: like that of an evaluation."""
        return self.get_eval_dataloader(test_dataset)

    def begin_epoch(self) -> None:
        """Choose the order of the epoch."""
        if self._order is not None:
            self._order.set_epoch(self.place.epoch)

    # --- One training step ---

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[list[Any], None]:
        """Take the micro-batches of an optimizer step, which share the total of their losses."""
        batches = list(islice(epoch_iterator, num_batches))
        if not batches:
            return [], None
        counts = [torch.cat([self.weigh(each), torch.tensor([each.tokens()])]) for each in batches]
        sums = self.ranks.sum(torch.stack(counts).sum(0).to(device))
        totals, self._tokens = sums[:-1], sums[-1] // self.ranks.per_row
        self._agree_on(max(batches, key=lambda rows: max(rows.lengths)))
        known = [each.of_step(totals, len(batches), "train").to(device) for each in batches]
        return self.before_step(known), None

    def _agree_on(self, rows: Any, model: nn.Module | None = None) -> None:
        """Let all ranks decide together in which layout rows up to this length are scored."""
        if self.ranks.count > 1:
            with self.accelerator.autocast():
                reader = self.reader(self.model)
                self.scorer.agree(model or self.model, rows.flat, self.ranks.largest, reader)

    def prepare(self, inputs: Any, mode: Mode) -> Any:
        """Make a step of the rows of an evaluation; those of training are known to be in one."""
        if mode == "train":
            return inputs
        self._agree_on(inputs)
        device = self.args.device
        rows = inputs.of_step(self.weigh(inputs).to(device), 1, mode).to(device)
        return self.before_step([rows])[0]

    @torch.no_grad()
    def frozen(
        self, model: nn.Module, rows: Any, read: Callable[[TokenScores, Any], Tensor]
    ) -> Tensor:
        """Score rows without gradient, in the pieces of training.

        What is returned are the values (B, ...) that `read` makes of scores and rows.
        """

        def score(part: Any) -> Tensor:
            scores = self.scorer.frozen_scores(model, part.flat)
            self.guard.watch("log-probability without gradient", scores.logps, part.flat)
            return read(scores, part)

        def work(at: range) -> Tensor:
            return torch.cat(list(map(score, self.phases.pieces(rows.select(at)))))

        with self.phases("scoring"), self.accelerator.autocast():
            return torch.cat(self._scoring.run(len(rows), work))

    def with_reference(self, rows: Any) -> Any:
        """Add the `ref_logps` of answers (B, K), unless they were computed beforehand."""
        if self.reference is None or "ref_logps" in rows.values:
            return rows
        with self.reference.active(self.model) as model:
            return rows.with_values(ref_logps=self.frozen(model, rows, self.answer_logps))

    def answer_logps(self, scores: TokenScores, rows: Any) -> Tensor:
        """Log-probabilities of the answers of some rows (B, K): sums over their tokens."""
        return rows.by_group(scores.logps.sum(1))

    def predict(self, test_dataset: Any, *args: Any, **options: Any) -> Any:
        """Evaluate another dataset; `predictions` are values (rows, K) of its answers, by name.

        Rows that are left out because of their length have NaN.
        """
        self._predictions = found = Predictions()
        try:
            output = super().predict(test_dataset, *args, **options)
        finally:
            self._predictions = None
        rows = len(test_dataset) if isinstance(test_dataset, Dataset) else None
        return output._replace(predictions=found.table(self.ranks, rows) or None)

    def keep(self, rows: Any, **values: Tensor) -> None:
        """Remember values (B, K) of the answers of some rows, if they are a part of `predict`."""
        if self._predictions is not None:
            self._predictions.add(rows, values)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Return the loss of one micro-batch."""
        if return_outputs:
            raise ValueError(f"return_outputs=True cannot be used: {NO_LOGITS}.")
        mode: Mode = inputs.mode
        with self.phases("forward"):
            scores = self.score(model, inputs)
        sums = self.loss_of(scores, inputs)
        if mode == "train":
            loss = (sums / self.per_micro_batch(inputs.totals, inputs)).sum()
        else:  # what transformers makes of losses of batches weighs them by their rows
            self.metrics[mode].mean("loss", sums, inputs.totals)
            loss = (sums / inputs.totals.clamp(min=1)).sum()
        if (aux_loss := getattr(scores, "aux_loss", None)) is not None:
            loss = loss + self.router_coefficient * aux_loss * inputs.share_of_micro_batch
            self.metrics[mode].value("aux_loss", aux_loss)
        return loss

    def check_update(self, step: int) -> None:
        """Count the tokens of the update, now that the device has been waited for."""
        self.state.num_input_tokens_seen += int(self._tokens)
        self._tokens = 0

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """See `check_update`."""

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: Any) -> Any:
        """Rows are divided by the scorer, not by torch: it knows of documents and prompts."""
        return nullcontext, inputs
