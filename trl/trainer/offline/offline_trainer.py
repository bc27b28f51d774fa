"""The trainer that SFT, DPO, KTO and reward modelling share: data, steps and evaluation."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from accelerate import ParallelismConfig
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

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
from ...types import Mode, TokenScores
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

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers.utils.quantization_config import QuantizationConfigMixin

RawDataset: TypeAlias = Dataset | IterableDataset
BUFFERED = 10_000  # rows of the buffer in which a stream is shuffled


@add_trl_properties(OFFLINE_OPTIONS, COMMON_PROPERTIES)
class OfflineTrainer(BaseTrainer):
    """Prepares datasets, makes micro-batches, computes the totals of a step, and evaluates.

    A subclass defines how datasets are prepared; its options make its `Algorithm`.

    Arguments are those of `transformers.Trainer`; `eval_dataset` may be a dictionary of datasets,
    the tokenizer is by default that of the model, and `data_collator`, `compute_metrics`,
    `preprocess_logits_for_metrics` and `compute_loss_func` are refused. A model that is given by
    name is quantized by `quantization_config`; with `peft_config` an adapter is trained. A subclass
    that takes functions of logits gives `logit_metrics`.
    """

    config_class: ClassVar[type[OfflineConfig]]
    uncalled_methods = OFFLINE
    _order: MicroBatchSampler | MicroBatchStream | None = None  # of the training set
    _reader: RowReader | None = None  # of the training set; None for a stream
    _predictions: Predictions | None = None  # while `predict` runs
    _tokens: Tensor | int = 0  # of the update that is being computed, on all ranks
    _own_datasets: Sequence[object] = ()  # of the trainer, which are prepared

    def __init__(
        self,
        model: str | nn.Module,
        args: TrainingArguments | None = None,
        data_collator: None = None,
        train_dataset: RawDataset | PreparedStream | None = None,
        eval_dataset: RawDataset | PreparedStream | Mapping[str, RawDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_metrics: Callable[..., Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: None = None,
        quantization_config: "QuantizationConfigMixin | None" = None,
        peft_config: "PeftConfig | None" = None,
        *,
        compute_loss_func: None = None,
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
        self.remember_datasets()
        self._make_scorer()
        if self.ranks.per_row > 1:
            self._divide_rows()

    def _divide_rows(self) -> None:
        """Prepare the scorer for rows whose tokens are divided among ranks."""
        from ...models.context_parallel import ContextParallel, check_divisible

        check_divisible(self.model, self.ranks.per_row, self.args.max_length)
        self.scorer.context = ContextParallel(self.ranks.row_group())

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator; with `sp_size`, it does not know that ranks share rows.

        DeepSpeed's own attention would drop the masks that keep the documents of a row apart.
        """
        parallelism_config = self.args.parallelism_config
        if self.args.parallelism.sp_size > 1:
            names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
            self.args.parallelism_config = ParallelismConfig(**dict.fromkeys(names, 1))
        super().create_accelerator_and_postprocess()
        self.args.parallelism_config = parallelism_config

    def get_cp_size(self) -> int:
        """Return how many ranks share each row, by which transformers divides rows."""
        return self.ranks.per_row

    # --- Methods that a subclass may override ---

    def may_log_own_metrics(self) -> bool:
        """Return whether functions of the user may log metrics, such as `compute_metrics`."""
        return self._logit_metrics is not None or super().may_log_own_metrics()

    def adapt(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, args: OfflineConfig
    ) -> None:
        """Check a model, and change it and its tokenizer, before an adapter is added."""
        set_template(model, tokenizer, args)

    def prepare_dataset(
        self, dataset: RawDataset, encoder: TextEncoder, args: OfflineConfig, mode: Mode
    ) -> Dataset | PreparedStream:
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
        """Return the reader of hidden states with which ranks agree on the layout of rows."""
        return self.scorer.token_reader(model)

    def token_reader(self, model: nn.Module, mode: Mode) -> TokenReader:
        """Return a reader of log-probabilities; of entropies and statistics if they are logged."""
        needs = self.algorithm.needs
        is_logged = self.logs_next(mode)
        statistic = needs.statistic
        if statistic is None and is_logged:
            statistic = needs.logged_statistic
        return self.scorer.token_reader(model, with_entropy=is_logged, statistic=statistic)

    def score(self, model: nn.Module, batch: Batch) -> tuple[Batch, Any]:
        """Score a chunk with gradient: return the chunk, with more columns, and its scores.

        An evaluation batch is scored as a whole, without gradient.
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
        """Return the tokens of a pack, which counts as a row of a micro-batch; None: no packing."""
        return None

    # --- Data ---

    def _prepared(
        self,
        dataset: RawDataset | PreparedStream | Mapping[str, RawDataset] | None,
        args: OfflineConfig,
        mode: Mode = "eval",
    ) -> Any:
        """Prepare a dataset, or a dictionary of evaluation sets, unless it is the trainer's own."""
        if isinstance(dataset, Mapping):
            return {name: self._prepared(value, args) for name, value in dataset.items()} or None
        if dataset is None or self._is_prepared(dataset):
            return dataset
        check_dataset(f"{mode}_dataset", dataset)
        prepared = self.prepare_dataset(dataset, self._encoder, args, mode)
        if isinstance(prepared, PreparedStream) and args.shuffle_dataset and mode == "train":
            return prepared.shuffled(args.seed, BUFFERED)
        return prepared

    def _is_prepared(self, dataset: RawDataset | PreparedStream) -> bool:
        """Whether a dataset is one of the trainer's own, or a stream that was prepared."""
        is_own = any(dataset is own for own in self._own_datasets)
        return is_own or isinstance(dataset, PreparedStream)

    def _loader(
        self, dataset: Dataset | PreparedStream, mode: Mode
    ) -> tuple[DataLoader[Any], MicroBatchSampler | MicroBatchStream]:
        """Return a loader of micro-batches, and the object that orders its rows."""
        args = self.args
        shard = self.ranks.data_shard
        is_training = mode == "train"
        rows = args.per_device_train_batch_size if is_training else args.per_device_eval_batch_size
        limits = rows, args.max_tokens_per_micro_batch, self.pack_size(mode)
        options = {"collate_fn": self.collate, "pin_memory": args.dataloader_pin_memory}
        if args.dataloader_num_workers:
            options["num_workers"] = args.dataloader_num_workers
            options["prefetch_factor"] = args.dataloader_prefetch_factor
            options["persistent_workers"] = args.dataloader_persistent_workers
        if isinstance(dataset, PreparedStream):
            stream = MicroBatchStream(dataset, limits, shard)
            return DataLoader(stream, batch_size=None, **options), stream
        seed = args.order_seed if is_training else None
        order = MicroBatchSampler(token_counts(dataset), *limits, seed, shard)
        reader = RowReader(dataset)
        if is_training:
            self._reader = reader
        return DataLoader(reader, batch_sampler=order, **options), order

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of this rank's micro-batches."""
        loader, self._order = self._loader(self.train_dataset, "train")
        return loader

    def get_eval_dataloader(
        self, eval_dataset: str | RawDataset | PreparedStream | None = None
    ) -> DataLoader[Any]:
        """Return a loader of this rank's micro-batches of an evaluation set, raw or prepared."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        elif eval_dataset is None:
            eval_dataset = self.eval_dataset
        if eval_dataset is None:
            raise ValueError("There is no eval_dataset: pass one here, or to the trainer.")
        return self._loader(self._prepared(eval_dataset, self.args), "eval")[0]

    get_test_dataloader = get_eval_dataloader  # of `predict`

    def stored_rows(self) -> Any:
        """Return the rows that a stream reads or a lazy dataset encodes, for checkpoints."""
        dataset = self.train_dataset
        return dataset.rows if isinstance(dataset, PreparedStream) else raw_rows(dataset)

    def remember_datasets(self) -> None:
        """Remember that the trainer's datasets are prepared, unlike others that are set later."""
        evaluation = self.eval_dataset
        parts = evaluation.values() if isinstance(evaluation, Mapping) else [evaluation]
        self._own_datasets = [self.train_dataset, *parts]

    def replace_train_dataset(self, dataset: Dataset) -> None:
        """Train on another dataset of as many rows, such as one with further columns."""
        self.train_dataset = dataset
        self._own_datasets = [*self._own_datasets, dataset]
        if self._reader is not None:
            self._reader.read_from(dataset)

    def begin_epoch(self) -> None:
        """Use the order of the epoch that begins."""
        if self._order is not None:
            self._order.set_epoch(self.data_position.epoch)

    # --- One training step ---

    def take_step(self, inputs: list[Batch], mode: Mode) -> list[Batch]:
        """Give the micro-batches of an optimizer step their totals and their columns."""
        self._agree_on(max(inputs, key=lambda batch: max(batch.rows.lengths)))
        if mode == "train":
            tokens = torch.tensor(sum(self.num_tokens(batch) for batch in inputs))
            self._tokens = self.ranks.sum(tokens) // self.ranks.per_row
        batches = [replace(batch, mode=mode).to(self.args.device) for batch in inputs]
        step = Step(batches=with_totals(batches, self.ranks), ranks=self.ranks)
        return self.credit(self.annotate(step)).batches

    def _agree_on(self, batch: Batch, model: nn.Module | None = None) -> None:
        """Choose the layout for rows up to this length together; all ranks call this."""
        if self.ranks.count > 1:
            with self.accelerator.autocast():
                reader = self.reader(self.model)
                self.scorer.agree(model or self.model, batch.rows, self.ranks.max, reader)

    def evaluation_loop(self, *args: object, **options: object) -> Any:
        """Evaluate; metrics of `compute_metrics` are added to the others."""
        if self._logit_metrics is None:
            return super().evaluation_loop(*args, **options)
        self._logit_metrics.begin()
        output = super().evaluation_loop(*args, **options)
        prefix = options["metric_key_prefix"]
        for name, value in self._logit_metrics.result(self.ranks).items():
            output.metrics[f"{prefix}_{name}"] = value
        return output

    def predict(self, test_dataset: RawDataset, *args: Any, **options: Any) -> Any:
        """Evaluate another dataset; `predictions` are values (rows, K) of its answers.

        They are an array of scores (reward models), or a dictionary of rewards and
        log-probabilities. Rows that are left out because of their length have NaN.
        """
        self._predictions = predictions = Predictions()
        try:
            output = super().predict(test_dataset, *args, **options)
        finally:
            self._predictions = None
        rows = len(test_dataset) if isinstance(test_dataset, Dataset) else None
        tables = predictions.table(self.ranks, rows)
        return output._replace(predictions=tables.get("scores", tables or None))

    def loss(self, scores: TokenScores | Tensor, batch: Batch) -> LossTerms:
        """Return the loss terms of a chunk: for each its sum (), and its total () over the step.

        Metrics go to `self.metrics[batch.mode]`.
        """
        self.collect_predictions(scores, batch)
        return super().loss(scores, batch)

    def collect_predictions(self, scores: TokenScores | Tensor, batch: Batch) -> None:
        """Collect the values that `predict` returns, while it runs."""
        if self._predictions is not None:
            self._predictions.add(batch, self.algorithm.predictions(scores, batch))

    def record_loss(self, terms: LossTerms, mode: Mode) -> None:
        """Record the loss of an evaluation batch; transformers would weight batches by their rows.

        Each rank records its share of the totals, which are over all ranks.
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

    def _track_num_input_tokens(self, inputs: object) -> None:
        """Do nothing: `check_update` counts the tokens."""

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: object) -> Any:
        """Leave the rows whole: the scorer divides them, because it knows documents and prompts."""
        return nullcontext, inputs


def _check_train_dataset(dataset: object, args: OfflineConfig) -> None:
    """Raise an error if a dataset cannot be trained on."""
    if dataset is None:
        raise ValueError("train_dataset is required.")
    if not isinstance(dataset, PreparedStream):
        check_dataset("train_dataset", dataset)
    if isinstance(dataset, (IterableDataset, PreparedStream)) and args.max_steps <= 0:
        raise ValueError("An iterable train_dataset has no length: set max_steps above 0.")
