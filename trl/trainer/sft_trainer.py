"""SFT: the cross-entropy of examples, each token computed once."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from datasets import Dataset, IterableDataset
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback

from ..data.cutting import DocumentLimits, cut_documents
from ..data.encode import TextEncoder
from ..data.examples import RowReader, format_document
from ..data.lazy import is_lazy, lazy_documents
from ..data.prepare import first_row, prepare_supervised
from ..data.streams import PreparedStream
from ..data.supervised import SupervisedOptions
from ..models.logit_metrics import LogitMetrics
from ..types import Mode
from .base.best_metric import EVERY_EVALUATION, TOKENS
from .base.policy import EvalDataset
from .model_card import Method
from .offline.offline_trainer import OfflineTrainer
from .sft_config import SFTConfig

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers.utils.quantization_config import QuantizationConfigMixin

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

    args: SFTConfig
    config_class = SFTConfig
    evaluation_metrics = EVERY_EVALUATION | TOKENS | {"loss/*"}
    method = Method("SFT", "sft")

    def __init__(
        self,
        model: str | nn.Module,
        args: SFTConfig | None = None,
        data_collator: None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: EvalDataset = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_loss_func: None = None,
        compute_metrics: Callable[..., Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        quantization_config: "QuantizationConfigMixin | None" = None,
        peft_config: "PeftConfig | None" = None,
        formatting_func: Callable[[dict[str, Any]], str] | None = None,
    ):
        if formatting_func is not None and not callable(formatting_func):
            raise TypeError(
                "formatting_func must be a function that makes a text of a row, not "
                f"{formatting_func!r:.80}."
            )
        self._formatting_func = formatting_func
        logit_metrics = None
        if compute_metrics is not None or preprocess_logits_for_metrics is not None:
            logit_metrics = LogitMetrics(args, compute_metrics, preprocess_logits_for_metrics)
        super().__init__(
            model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            quantization_config=quantization_config,
            peft_config=peft_config,
            compute_loss_func=compute_loss_func,
            logit_metrics=logit_metrics,
        )

    def prepare_dataset(
        self, dataset: Dataset | IterableDataset, encoder: TextEncoder, args: SFTConfig, mode: Mode
    ) -> Any:
        """Tokenize, mask and cut to length."""
        options = SupervisedOptions.of(args, self._formatting_func)
        limits = DocumentLimits(
            max_length=args.max_length, long_rows=args.row_limit, bounds=encoder.bounds
        )
        if isinstance(dataset, Dataset):
            if is_lazy(dataset):
                return dataset
            if args.lazy_tokenization:
                return lazy_documents(dataset, encoder, options, limits)
        prepared = prepare_supervised(dataset, encoder, options, args.dataset_num_proc)
        if isinstance(prepared, Dataset):
            limits_text = ""
            if args.max_length:
                limits_text = f"max_length={args.max_length} (long_rows={args.row_limit!r})"
            advice = options.advice(first_row(dataset))
            return cut_documents(prepared, limits).checked(limits_text, advice)
        if args.wrapped_attends_across:
            raise ValueError("wrapped_attends_across=True cannot be used with a stream.")
        if args.row_limit == "wrapped":
            # Rows follow each other as they are read.
            limits = replace(limits, long_rows="split")
        return PreparedStream(prepared, partial(cut_documents, limits=limits))

    def pack_size(self, mode: Mode) -> int | None:
        """`max_length`, if documents are packed."""
        chosen = self.args.packing if mode == "train" else self.args.eval_packing
        packs = self.args.packing if chosen is None else chosen
        return self.args.max_length if packs else None

    def begin_training(self) -> None:
        """Show documents, with what is trained."""
        dataset = self.train_dataset
        if not isinstance(dataset, Dataset) or is_lazy(dataset):
            return
        if self.is_world_process_zero():
            rows = range(min(SHOWN, len(dataset)))
            for document in RowReader(dataset).__getitems__(list(rows)):
                print(format_document(document, self.processing_class), flush=True)
