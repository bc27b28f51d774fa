"""One training step for every trainer that learns from the examples of a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from ...data.encode import TextEncoder
from ...data.packing import MicroBatchSampler
from ...models.scorer import Scorer
from ...types import Mode, TokenScores
from ..base.base_trainer import BaseTrainer
from ..base.policy import check_devices, prepare_policy, router_coefficient
from ..base.setup_checks import check_run
from .batches import ItemStream, RankBatches, StreamBatches
from .offline_config import OfflineConfig
from .template import set_template

NO_LOGITS = "logits are never held as a whole, and rows are not padded"
# Arguments of constructors that cannot be served, and why.
UNSUPPORTED = {
    "data_collator": "rows are laid out by the trainer, without padding. To choose the tokens in "
    "the loss, give `input_ids` with `labels`",
    "compute_loss_func": f"{NO_LOGITS}. To change the loss, override `loss_of`",
    "compute_metrics": f"{NO_LOGITS}. Metrics are in the log; others can be added in `loss_of`",
    "preprocess_logits_for_metrics": NO_LOGITS,
}


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
        options: further arguments of `transformers.Trainer`.
    """

    config_class: ClassVar[type[OfflineConfig]]

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
        **options: Any,
    ):
        for name, reason in UNSUPPORTED.items():
            if options.pop(name, None) is not None:
                raise ValueError(f"{name} cannot be used: {reason}. Leave it out.")
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = self.config_class(f"{name.rstrip('/').split('/')[-1]}-{self.method.name}")
        check_run(model, args, self.config_class)
        check_devices(args)
        _check_dataset("train_dataset", train_dataset)
        if isinstance(train_dataset, IterableDataset) and args.max_steps <= 0:
            raise ValueError("An iterable train_dataset has no length: set max_steps above 0.")
        policy = prepare_policy(
            *(model, args, processing_class, quantization_config, peft_config),
            change=partial(set_template, args=args),
        )
        self._encoder = TextEncoder(policy.tokenizer)
        with args.main_process_first(desc="tokenizing"):
            train = self.prepare_dataset(train_dataset, self._encoder, args, "train")
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
        self.router_coefficient = router_coefficient(self.model, args)
        self.scorer = Scorer(
            pad_id=policy.tokenizer.pad_token_id,
            temperature=1.0,
            device=args.device,
            pad_multiple=args.pad_multiple,
            router_logits=self.router_coefficient != 0.0,
            shared_prefix=args.shared_prefix,
            chunk=args.logits_chunk_size,
        )
        self.phases.on_forget(self.scorer.forget)
        self._order: RankBatches | StreamBatches | None = None
        self._tokens: Tensor | int = 0  # of the update that is being computed, on all ranks

    # --- What an algorithm says ---

    def prepare_dataset(self, dataset: Any, encoder: TextEncoder, args: Any, mode: Mode) -> Any:
        """Turn a dataset into prepared items.

        The trainer is not set up yet when its own datasets are prepared.

        Returns:
            Items by index, with their tokens in `lengths`; of a stream, an `ItemStream`.
        """
        raise NotImplementedError

    def collate(self, items: Sequence[Any]) -> Any:
        """Make the rows of a micro-batch of prepared items."""
        raise NotImplementedError

    def loss_of(self, scores: TokenScores, rows: Any) -> Tensor:
        """Return the sum of the losses of some rows (); the total of the step divides it.

        Metrics go to `self.metrics[rows.mode]`.
        """
        raise NotImplementedError

    def pack_size(self, mode: Mode) -> int | None:
        """Tokens of a pack of items that counts as one row of a micro-batch; None: no packs."""
        return None

    # --- Data ---

    def _prepared(self, dataset: Any, args: OfflineConfig) -> Any:
        """Prepare an evaluation set, or a dictionary of them; what is prepared stays."""
        if isinstance(dataset, Mapping):
            return {name: self._prepared(one, args) for name, one in dataset.items()} or None
        if dataset is None or hasattr(dataset, "rows"):
            return dataset
        _check_dataset("eval_dataset", dataset)
        return self.prepare_dataset(dataset, self._encoder, args, "eval")

    def _loader(self, dataset: Any, mode: Mode) -> tuple[DataLoader[Any], Any]:
        """A loader of this rank's micro-batches, and what decides their order."""
        args, place = self.args, (self.ranks.rank, self.ranks.count)
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
        counts = [torch.stack([each.weight(), torch.tensor(each.tokens())]) for each in batches]
        total, self._tokens = self.ranks.sum(torch.stack(counts).sum(0).to(device)).unbind()
        self._agree_on(max(batches, key=lambda rows: max(rows.lengths)))
        return [each.of_step(total, len(batches), "train") for each in batches], None

    def _agree_on(self, rows: Any) -> None:
        """Let all ranks decide together in which layout rows up to this length are scored."""
        if self.ranks.count > 1:
            with self.accelerator.autocast():
                self.scorer.agree(self.model, rows, self.ranks.largest)

    def prepare(self, inputs: Any, mode: Mode) -> Any:
        """Bring rows to the device; those of an evaluation are a step of their own."""
        if mode == "eval":
            self._agree_on(inputs)
            inputs = inputs.of_step(inputs.weight().to(self.args.device), 1, mode)
        return inputs.to(self.args.device)

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
            scores = self.scorer(model, inputs, with_entropy=self.logs_next(mode))
        self.guard.watch("log-probability", scores.logps, inputs)
        total = self.loss_of(scores, inputs)
        if mode == "train":
            loss = total / self.per_micro_batch(inputs.total, inputs)
        else:  # what transformers makes of losses of batches weighs them by their rows
            self.metrics[mode].mean("loss", total, inputs.total)
            loss = total / inputs.total.clamp(min=1)
        if scores.aux_loss is not None:
            loss = loss + self.router_coefficient * scores.aux_loss * inputs.share_of_micro_batch
            self.metrics[mode].value("aux_loss", scores.aux_loss)
        return loss

    def check_update(self, step: int) -> None:
        """Count the tokens of the update, now that the device has been waited for."""
        self.state.num_input_tokens_seen += int(self._tokens)
        self._tokens = 0

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """See `check_update`."""


def _check_dataset(name: str, dataset: Any) -> None:
    if dataset is None:
        raise ValueError(f"{name} is required.")
    if not isinstance(dataset, Dataset | IterableDataset):
        raise TypeError(
            f"{name} must be a datasets.Dataset or IterableDataset, not {type(dataset).__name__}."
        )
    images = {"image", "images"} & set(dataset.column_names or ())
    if images:
        raise NotImplementedError(
            f"{name} has the column {images.pop()!r}: images are not available in this release. "
            "Remove the column to train on text."
        )
