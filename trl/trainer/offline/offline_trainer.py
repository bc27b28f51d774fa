"""One training step for every trainer that learns from the examples of a dataset."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from accelerate import ParallelismConfig
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, TrainerCallback

from ...data.encode import TextEncoder
from ...data.examples import Example, RowReader, token_counts
from ...data.lazy import raw_rows
from ...data.packing import MicroBatchSampler
from ...data.rows import AnswerRows
from ...data.streams import MicroBatchStream, PreparedStream
from ...models.loading import model_bounds
from ...models.logit_metrics import LogitMetrics
from ...models.scorer import Reader
from ...ops.logit_statistics import LogitStatistic
from ...types import Mode
from ..attributes import COMMON_PROPERTIES, OFFLINE_OPTIONS, add_trl_properties
from ..base.base_trainer import BaseTrainer
from ..base.policy import (
    check_additions,
    check_dataset,
    check_optimizer,
    checked_args,
    prepare_policy,
)
from ..uncalled import OFFLINE
from .batches import Predictions
from .offline_config import NO_LOGITS, UNSUPPORTED, OfflineConfig, set_template

BUFFERED = 10_000  # rows of a stream that is shuffled


@add_trl_properties(OFFLINE_OPTIONS, COMMON_PROPERTIES)
class OfflineTrainer(BaseTrainer):
    """The skeleton: preparing datasets, micro-batches, totals of a step, evaluation.

    An algorithm is a subclass that says how a dataset becomes items (`prepare_dataset`), items
    the rows of a micro-batch (`collate`), and scores of rows a loss (`loss_of`).

    Arguments are those of `transformers.Trainer`; `eval_dataset` may be a dictionary of datasets,
    the tokenizer is by default that of the model, and `data_collator`, `compute_metrics`,
    `preprocess_logits_for_metrics` and `compute_loss_func` are refused. A model that is given by
    name is quantized by `quantization_config`; with `peft_config` an adapter is trained. A subclass
    that takes functions of logits gives `logit_metrics`.
    """

    config_class: ClassVar[type[OfflineConfig]]
    uncalled_methods = OFFLINE
    rows_class: ClassVar[Any] = AnswerRows  # made of prepared items, for a micro-batch
    _order: MicroBatchSampler | MicroBatchStream | None = None  # of what is trained on
    _reader: RowReader | None = None  # of what is trained on, unless it is a stream
    _predictions: Predictions | None = None  # while there is something to predict
    _tokens: Tensor | int = 0  # of the update that is being computed, on all ranks

    def __init__(
        self,
        model: str | nn.Module,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_metrics: Callable[..., Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        compute_loss_func: Any = None,
        logit_metrics: LogitMetrics | None = None,
    ):
        self._logit_metrics = logit_metrics
        given = data_collator, compute_loss_func, compute_metrics, preprocess_logits_for_metrics
        pairs = zip(UNSUPPORTED, given, strict=True)
        if found := [name for name, value in pairs if value is not None]:
            raise ValueError(f"{found[0]} cannot be used: {UNSUPPORTED[found[0]]}. Leave it out.")
        args = checked_args(model, args, self.config_class, self.method.name)
        check_additions(callbacks, optimizers)
        if train_dataset is None:
            raise ValueError("train_dataset is required.")
        if not isinstance(train_dataset, PreparedStream):
            check_dataset("train_dataset", train_dataset)
        streams = (IterableDataset, PreparedStream)
        if isinstance(train_dataset, streams) and args.max_steps <= 0:
            raise ValueError("An iterable train_dataset has no length: set max_steps above 0.")
        policy = prepare_policy(
            *(model, args, processing_class, quantization_config, peft_config),
            change=partial(self.adapt, args=args),
        )
        check_optimizer(policy.model, optimizers[0])
        self._encoder = TextEncoder(policy.tokenizer, model_bounds(policy.model))
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
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        self._make_scorer()
        if self.ranks.per_row > 1:
            from ...models.context_parallel import ContextParallel, check_divisible

            check_divisible(self.model, self.ranks.per_row, args.max_length)
            self.scorer.context = ContextParallel(self.ranks.row_group())

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator; with `sp_size`, ranks of one row are ordinary ones to it.

        DeepSpeed's own attention would drop the masks that keep the documents of a row apart.
        """
        given = self.args.parallelism_config
        if self.args.parallelism.sp_size > 1:
            names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
            self.args.parallelism_config = ParallelismConfig(**dict.fromkeys(names, 1))
        super().create_accelerator_and_postprocess()
        self.args.parallelism_config = given

    def get_cp_size(self) -> int:
        """Ranks that have the same rows, for `transformers` to count the rows of an update."""
        return self.ranks.per_row

    # --- What an algorithm says ---

    def may_log_own_metrics(self) -> bool:
        """Whether there are functions of logits, or others."""
        return self._logit_metrics is not None or super().may_log_own_metrics()

    def adapt(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, args: Any) -> None:
        """Check a model, and change it and its tokenizer, before an adapter is added."""
        set_template(model, tokenizer, args)

    def prepare_dataset(self, dataset: Any, encoder: TextEncoder, args: Any, mode: Mode) -> Any:
        """Turn a dataset into a prepared one, or a stream into a `PreparedStream`.

        The trainer is not set up yet when its own datasets are prepared.
        """
        raise NotImplementedError

    def collate(self, examples: Sequence[Example]) -> Any:
        """Make the rows of a micro-batch of examples."""
        return self.rows_class.of(examples)

    def reader(self, model: nn.Module) -> Reader:
        """What reads the hidden states of rows, for ranks to agree on their layout."""
        return self.scorer.token_reader(model)

    def statistic(self, rows: Any) -> LogitStatistic | None:
        """What is read off the logits of some rows besides log-probabilities."""
        return None

    def score(self, model: nn.Module, rows: Any) -> Any:
        """Compute what the loss of the rows of a micro-batch depends on, with gradient."""
        reader = self.scorer.token_reader(
            model, with_entropy=self.logs_next(rows.mode), statistic=self.statistic(rows)
        )
        readers: list[Reader] = [reader]
        if rows.mode == "eval" and self._logit_metrics is not None:
            readers.append(self._logit_metrics.reader(self.scorer.heads.find(model), rows))
        (results, *_), aux_loss = self.scorer.read(model, rows.flat, readers)
        scores = reader.scores(results, aux_loss=aux_loss)
        self.guard.watch("log-probability", scores.logps, rows.flat)
        return scores

    def loss_of(self, scores: Any, rows: Any) -> Tensor:
        """Return the sum of the losses of some rows (k,); the totals of the step divide it.

        Metrics go to `self.metrics[rows.mode]`.
        """
        raise NotImplementedError

    def weigh(self, rows: Any) -> Tensor:
        """Say what the sums of `loss_of` (k,) are divided by, once it is added up over a step."""
        return rows.values["counts"].sum()[None]

    def before_step(self, batches: list[Any]) -> list[Any]:
        """Add to the micro-batches of an optimizer step what is computed without gradient.

        Each knows `totals` and is on the device; an evaluation batch is a step of its own.
        """
        return batches

    def pack_size(self, mode: Mode) -> int | None:
        """Tokens of a pack of items that counts as one row of a micro-batch; None: no packs."""
        return None

    # --- Data ---

    def _prepared(self, dataset: Any, args: OfflineConfig, mode: Mode = "eval") -> Any:
        """Prepare a dataset, or a dictionary of evaluation sets."""
        if isinstance(dataset, Mapping):
            return {name: self._prepared(one, args) for name, one in dataset.items()} or None
        if dataset is None or isinstance(dataset, PreparedStream):
            return dataset
        check_dataset(f"{mode}_dataset", dataset)
        prepared = self.prepare_dataset(dataset, self._encoder, args, mode)
        if isinstance(prepared, PreparedStream) and args.shuffle_dataset and mode == "train":
            return prepared.shuffled(args.seed, BUFFERED)
        return prepared

    def _loader(self, dataset: Any, mode: Mode) -> tuple[DataLoader[Any], Any]:
        args, place = self.args, self.ranks.data_shard
        is_training = mode == "train"
        rows = args.per_device_train_batch_size if is_training else args.per_device_eval_batch_size
        limits = rows, args.max_tokens_per_micro_batch, self.pack_size(mode)
        shared = {"collate_fn": self.collate, "pin_memory": args.dataloader_pin_memory}
        if count := args.dataloader_num_workers:
            shared |= {"num_workers": count, "prefetch_factor": args.dataloader_prefetch_factor}
            shared["persistent_workers"] = args.dataloader_persistent_workers
        if isinstance(dataset, PreparedStream):
            stream = MicroBatchStream(dataset, limits, place)
            return DataLoader(stream, batch_size=None, **shared), stream
        seed = args.order_seed if is_training else None
        order = MicroBatchSampler(token_counts(dataset), *limits, seed, place)
        reader = RowReader(dataset)
        if is_training:
            self._reader = reader
        return DataLoader(reader, batch_sampler=order, **shared), order

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
        if eval_dataset is None:
            raise ValueError("There is no eval_dataset: pass one here, or to the trainer.")
        own = self.eval_dataset.values() if isinstance(self.eval_dataset, Mapping) else ()
        if not any(eval_dataset is dataset for dataset in (self.eval_dataset, *own)):
            eval_dataset = self._prepared(eval_dataset, self.args)
        return self._loader(eval_dataset, "eval")[0]

    get_test_dataloader = get_eval_dataloader  # of `predict`

    def stored_rows(self) -> Any:
        """What is read of a stream, or encoded by a lazy dataset; see `CheckpointedTrainer`."""
        dataset = self.train_dataset
        return dataset.rows if isinstance(dataset, PreparedStream) else raw_rows(dataset)

    def replace_train_dataset(self, dataset: Dataset) -> None:
        """Train on another dataset of as many rows, such as one with further columns."""
        self.train_dataset = dataset
        if self._reader is not None:
            self._reader.read_from(dataset)

    def begin_epoch(self) -> None:
        if self._order is not None:
            self._order.set_epoch(self.data_position.epoch)

    # --- One training step ---

    def take_step(self, inputs: list[Any], mode: Mode) -> list[Any]:
        """Let the micro-batches of an optimizer step share the total of their losses."""
        counts = [torch.cat([self.weigh(rows), torch.tensor([rows.tokens()])]) for rows in inputs]
        sums = self.ranks.sum(torch.stack(counts).sum(0).to(self.args.device))
        totals = sums[:-1]
        if mode == "train":
            self._tokens = sums[-1] // self.ranks.per_row
        else:
            totals = self.weigh(inputs[0]).to(self.args.device)
        self._agree_on(max(inputs, key=lambda rows: max(rows.flat.lengths)))
        batches = [rows.of_step(totals, len(inputs), mode).to(self.args.device) for rows in inputs]
        return self.before_step(batches)

    def _agree_on(self, rows: Any, model: nn.Module | None = None) -> None:
        """Let all ranks decide together in which layout rows up to this length are scored."""
        if self.ranks.count > 1:
            with self.accelerator.autocast():
                reader = self.reader(self.model)
                self.scorer.agree(model or self.model, rows.flat, self.ranks.max, reader)

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Evaluate; metrics of `compute_metrics` are added to the others."""
        if self._logit_metrics is None:
            return super().evaluation_loop(*args, **options)
        self._logit_metrics.begin()
        output = super().evaluation_loop(*args, **options)
        found, prefix = self._logit_metrics.result(self.ranks), options["metric_key_prefix"]
        output.metrics.update({f"{prefix}_{name}": value for name, value in found.items()})
        return output

    def predict(self, test_dataset: Any, *args: Any, **options: Any) -> Any:
        """Evaluate another dataset; `predictions` are values (rows, K) of its answers.

        Log-probabilities and rewards are by name, scores alone. Rows that are left out because of
        their length have NaN.
        """
        self._predictions = found = Predictions()
        try:
            output = super().predict(test_dataset, *args, **options)
        finally:
            self._predictions = None
        rows = len(test_dataset) if isinstance(test_dataset, Dataset) else None
        tables = found.table(self.ranks, rows)
        return output._replace(predictions=tables.get("scores", tables or None))

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
