"""One training step for every trainer that learns from the examples of a dataset."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from accelerate import ParallelismConfig
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, TrainerCallback

from ...algorithms.base import LossTerms
from ...batch import Batch, Step, with_totals
from ...data.encode import TextEncoder
from ...data.examples import Example, RowReader, batch_columns, make_group, token_counts
from ...data.lazy import raw_rows
from ...data.packing import MicroBatchSampler
from ...data.streams import MicroBatchStream, PreparedStream
from ...models.loading import model_bounds
from ...models.logit_metrics import LogitMetrics
from ...models.scorer import Reader, TokenReader
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
from .offline_config import OfflineConfig, check_unsupported, set_template

BUFFERED = 10_000  # rows of a stream that is shuffled


@add_trl_properties(OFFLINE_OPTIONS, COMMON_PROPERTIES)
class OfflineTrainer(BaseTrainer):
    """The skeleton: preparing datasets, micro-batches, totals of a step, evaluation.

    The options of a subclass make its `Algorithm`; it says how datasets are prepared.

    Arguments are those of `transformers.Trainer`; `eval_dataset` may be a dictionary of datasets,
    the tokenizer is by default that of the model, and `data_collator`, `compute_metrics`,
    `preprocess_logits_for_metrics` and `compute_loss_func` are refused. A model that is given by
    name is quantized by `quantization_config`; with `peft_config` an adapter is trained. A subclass
    that takes functions of logits gives `logit_metrics`.
    """

    config_class: ClassVar[type[OfflineConfig]]
    uncalled_methods = OFFLINE
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
        check_unsupported(
            {
                "data_collator": data_collator,
                "compute_loss_func": compute_loss_func,
                "compute_metrics": compute_metrics,
                "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
            }
        )
        args = checked_args(model, args, self.config_class, self.method.name)
        check_additions(callbacks, optimizers)
        _check_train_dataset(train_dataset, args)
        policy = prepare_policy(
            model,
            args,
            processing_class,
            quantization_config,
            peft_config,
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
            self._divide_rows()

    def _divide_rows(self) -> None:
        """Let several ranks score each row together."""
        from ...models.context_parallel import ContextParallel, check_divisible

        check_divisible(self.model, self.ranks.per_row, self.args.max_length)
        self.scorer.context = ContextParallel(self.ranks.row_group())

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator; with `sp_size`, ranks of one row are ordinary ones to it.

        DeepSpeed's own attention would drop the masks that keep the documents of a row apart.
        """
        parallelism_config = self.args.parallelism_config
        if self.args.parallelism.sp_size > 1:
            names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
            self.args.parallelism_config = ParallelismConfig(**dict.fromkeys(names, 1))
        super().create_accelerator_and_postprocess()
        self.args.parallelism_config = parallelism_config

    def get_cp_size(self) -> int:
        """Ranks that have the same rows, for `transformers` to count the rows of an update."""
        return self.ranks.per_row

    # --- What a subclass says ---

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

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Make a micro-batch of examples."""
        return Batch.of(
            [make_group(example) for example in examples],
            columns=batch_columns(examples),
            keeps_groups=self.algorithm.needs.whole_groups,
        )

    def reader(self, model: nn.Module) -> Reader:
        """Make what reads hidden states, for ranks to agree on the layout of rows."""
        return self.scorer.token_reader(model)

    def token_reader(self, model: nn.Module, mode: Mode) -> TokenReader:
        """Make what reads log-probabilities, and where they are logged entropies and statistics."""
        needs = self.algorithm.needs
        is_logged = self.logs_next(mode)
        statistic = needs.statistic
        if statistic is None and is_logged:
            statistic = needs.logged_statistic
        return self.scorer.token_reader(model, with_entropy=is_logged, statistic=statistic)

    def score(self, model: nn.Module, batch: Batch) -> tuple[Batch, Any]:
        """Score a chunk with gradient: the chunk, which may get columns, and what its loss reads.

        An evaluation batch is scored without gradient, as a whole.
        """
        reader = self.token_reader(model, batch.mode)
        readers: list[Reader] = [reader]
        if batch.mode == "eval" and self._logit_metrics is not None:
            readers.append(self._logit_metrics.reader(self.scorer.heads.find(model), batch))
        (results, *_), aux_loss = self.scorer.read(model, batch.rows, readers)
        scores = reader.scores(results, aux_loss=aux_loss)
        self.guard.watch("log-probability", scores.logps, batch.rows)
        return batch, scores

    def annotate(self, step: Step) -> Step:
        """Add the columns of a step that are computed without gradient."""
        return step

    def num_tokens(self, batch: Batch) -> int:
        """Count the tokens of a batch for `num_tokens` in the log."""
        return batch.num_tokens

    def pack_size(self, mode: Mode) -> int | None:
        """Tokens of a pack of items that counts as one row of a micro-batch; None: no packs."""
        return None

    # --- Data ---

    def _prepared(self, dataset: Any, args: OfflineConfig, mode: Mode = "eval") -> Any:
        """Prepare a dataset, or a dictionary of evaluation sets."""
        if isinstance(dataset, Mapping):
            return {name: self._prepared(value, args) for name, value in dataset.items()} or None
        if dataset is None or isinstance(dataset, PreparedStream):
            return dataset
        check_dataset(f"{mode}_dataset", dataset)
        prepared = self.prepare_dataset(dataset, self._encoder, args, mode)
        if isinstance(prepared, PreparedStream) and args.shuffle_dataset and mode == "train":
            return prepared.shuffled(args.seed, BUFFERED)
        return prepared

    def _loader(self, dataset: Any, mode: Mode) -> tuple[DataLoader[Any], Any]:
        args = self.args
        place = self.ranks.data_shard
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

    def take_step(self, inputs: list[Batch], mode: Mode) -> list[Batch]:
        """Annotate the micro-batches of an optimizer step, and let them know its totals."""
        self._agree_on(max(inputs, key=lambda batch: max(batch.rows.lengths)))
        if mode == "train":
            tokens = torch.tensor(sum(self.num_tokens(batch) for batch in inputs))
            self._tokens = self.ranks.sum(tokens) // self.ranks.per_row
        batches = [replace(batch, mode=mode).to(self.args.device) for batch in inputs]
        step = Step(batches=with_totals(batches, self.ranks), ranks=self.ranks)
        return self.credit(self.annotate(step)).batches

    def _agree_on(self, batch: Batch, model: nn.Module | None = None) -> None:
        """Let all ranks decide together in which layout rows up to this length are scored."""
        if self.ranks.count > 1:
            with self.accelerator.autocast():
                reader = self.reader(self.model)
                self.scorer.agree(model or self.model, batch.rows, self.ranks.max, reader)

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Evaluate; metrics of `compute_metrics` are added to the others."""
        if self._logit_metrics is None:
            return super().evaluation_loop(*args, **options)
        self._logit_metrics.begin()
        output = super().evaluation_loop(*args, **options)
        prefix = options["metric_key_prefix"]
        for name, value in self._logit_metrics.result(self.ranks).items():
            output.metrics[f"{prefix}_{name}"] = value
        return output

    def predict(self, test_dataset: Any, *args: Any, **options: Any) -> Any:
        """Evaluate another dataset; `predictions` are values (rows, K) of its answers.

        Log-probabilities and rewards are by name, scores alone. Rows that are left out because of
        their length have NaN.
        """
        self._predictions = predictions = Predictions()
        try:
            output = super().predict(test_dataset, *args, **options)
        finally:
            self._predictions = None
        rows = len(test_dataset) if isinstance(test_dataset, Dataset) else None
        tables = predictions.table(self.ranks, rows)
        return output._replace(predictions=tables.get("scores", tables or None))

    def loss(self, scores: Any, batch: Batch) -> LossTerms:
        """Return the terms of the loss of a chunk: of each the sum, and its total over the step.

        Metrics go to `self.metrics[batch.mode]`.
        """
        self.collect_predictions(scores, batch)
        return super().loss(scores, batch)

    def collect_predictions(self, scores: Any, batch: Batch) -> None:
        """Keep what `predict` returns, while it runs."""
        if self._predictions is not None:
            self._predictions.add(batch, self.algorithm.predictions(scores, batch))

    def record_loss(self, terms: LossTerms, mode: Mode) -> None:
        """Record the loss of an evaluation batch; transformers would weigh batches by their rows.

        Totals are of all ranks, each of which records its share of them.
        """
        if mode == "train":
            return
        sums = [term_sum for name, (term_sum, _) in terms.items() if name != "aux_loss"]
        totals = [total for name, (_, total) in terms.items() if name != "aux_loss"]
        weights = torch.stack(totals) / self.ranks.count
        self.metrics[mode].mean("loss", torch.stack(sums), weights)

    def check_update(self, step: int) -> None:
        """Count the tokens of the update, now that the device has been waited for."""
        self.state.num_input_tokens_seen += int(self._tokens)
        self._tokens = 0

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """See `check_update`."""

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: Any) -> Any:
        """Rows are divided by the scorer, not by torch: it knows of documents and prompts."""
        return nullcontext, inputs


def _check_train_dataset(dataset: Any, args: OfflineConfig) -> None:
    """Refuse what cannot be trained on."""
    if dataset is None:
        raise ValueError("train_dataset is required.")
    if not isinstance(dataset, PreparedStream):
        check_dataset("train_dataset", dataset)
    if isinstance(dataset, (IterableDataset, PreparedStream)) and args.max_steps <= 0:
        raise ValueError("An iterable train_dataset has no length: set max_steps above 0.")
