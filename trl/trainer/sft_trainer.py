"""SFT: the cross-entropy of examples, each token computed once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, TrainerCallback

from ..data.encode import TextEncoder
from ..data.prepare import LazySupervisedDataset, SupervisedDataset, first_row, prepare_supervised
from ..data.rows import SupervisedRows, shown
from ..data.supervised import SupervisedOptions
from ..models.logit_metrics import LogitMetrics
from ..online.metrics import record_accuracy, record_entropy
from ..ops.masking import masked_sum
from ..types import Mode, TokenScores
from .base.best_metric import EVERY_EVALUATION, TOKENS
from .model_card import Method
from .offline.batches import ItemStream
from .offline.offline_trainer import OfflineTrainer
from .sft_config import SFTConfig

SHOWN = 2  # documents, when training begins


class SFTTrainer(OfflineTrainer):
    """Trains on texts, conversations, or completions of prompts.

    The loss of an optimizer step is the mean, over all trained tokens of all micro-batches and
    ranks, of -log p(token); with `loss_type="dft"` each term is multiplied by p(token), without
    gradient. Rows lie end to end without padding and never see each other.

    Datasets have `text`, `messages`, `conversations`, `prompt` with `completion`, or `input_ids`;
    a `formatting_func` makes a text of an example. `compute_metrics` and
    `preprocess_logits_for_metrics` are called as `LogitMetrics` says. The other arguments are those
    of `OfflineTrainer`.
    """

    config_class = SFTConfig
    evaluation_metrics = EVERY_EVALUATION | TOKENS | {"loss/*"}
    rows_class = SupervisedRows
    method = Method("SFT", "sft")

    def __init__(
        self,
        model: str | nn.Module,
        args: SFTConfig | None = None,
        data_collator: None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_loss_func: None = None,
        compute_metrics: Callable[..., Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[dict[str, Any]], str] | None = None,
    ):
        if formatting_func is not None and not callable(formatting_func):
            raise TypeError(
                "formatting_func must be a function that makes a text of a row, not "
                f"{formatting_func!r:.80}."
            )
        self._formatting_func = formatting_func
        functions = compute_metrics, preprocess_logits_for_metrics
        metrics = None if functions == (None, None) else LogitMetrics(args, *functions)
        super().__init__(
            *(model, args, data_collator, train_dataset, eval_dataset, processing_class),
            *(None, callbacks, optimizers, optimizer_cls_and_kwargs),
            *(None, quantization_config, peft_config),
            compute_loss_func=compute_loss_func,
            logit_metrics=metrics,
        )

    def prepare_dataset(
        self, dataset: Any, encoder: TextEncoder, args: SFTConfig, mode: Mode
    ) -> Any:
        """Tokenize, mask and cut to length."""
        options = SupervisedOptions.of(args, self._formatting_func)
        limits: dict[str, Any] = {
            "max_length": args.max_length,
            "long_rows": args.row_limit,
            "bounds": encoder.bounds,
        }
        if isinstance(dataset, Dataset) and args.lazy_tokenization:
            return LazySupervisedDataset(dataset, encoder, options, **limits)
        table = prepare_supervised(dataset, encoder, options, args.dataset_num_proc)
        if isinstance(table, Dataset):
            words = f"max_length={args.max_length} (long_rows={args.row_limit!r})"
            rows, options_text = SupervisedDataset(table, **limits), words * bool(args.max_length)
            return rows.checked(options_text, options.advice(first_row(dataset)))
        if args.wrapped_attends_across:
            raise ValueError("wrapped_attends_across=True cannot be used with a stream.")
        if args.row_limit == "wrapped":
            limits["long_rows"] = "split"  # rows follow each other as they are read
        return ItemStream(table, partial(SupervisedDataset, **limits))

    def pack_size(self, mode: Mode) -> int | None:
        """`max_length`, if documents are packed."""
        chosen = self.args.packing if mode == "train" else self.args.eval_packing
        packs = self.args.packing if chosen is None else chosen
        return self.args.max_length if packs else None

    def weigh(self, rows: SupervisedRows) -> Tensor:
        """Tokens in the loss (1,)."""
        return rows.loss_mask.sum()[None]

    def begin_training(self) -> None:
        """Show documents, with what is trained."""
        if isinstance(self.train_dataset, SupervisedDataset) and self.is_world_process_zero():
            for place in range(min(SHOWN, len(self.train_dataset))):
                print(shown(self.train_dataset[place], self.processing_class), flush=True)

    def loss_of(self, scores: TokenScores, rows: SupervisedRows) -> Tensor:
        """Return the sum of the losses of the trained tokens (1,)."""
        losses, store = -scores.logps, self.metrics[rows.mode]
        if self.args.loss_type == "dft":
            losses = losses * torch.exp(scores.logps.detach())
        if scores.entropies is not None and scores.hits is not None:
            record_entropy(store, scores.entropies.detach(), rows.loss_mask)
            record_accuracy(store, scores.hits, rows.loss_mask)
        origins = [document.origin for document in rows.items]
        for name in sorted(filter(None, set(origins))):
            chosen = torch.tensor([[origin == name] for origin in origins])
            mask = rows.loss_mask & chosen.to(losses.device, non_blocking=True)
            store.mean(f"loss/{name}", masked_sum(losses.detach(), mask), mask.sum())
        return masked_sum(losses, rows.loss_mask)[None]
