"""The training loop of every trainer: what is added to that of `transformers.Trainer`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from ...algorithms.base import Algorithm, LossTerms, divide, with_changed_options
from ...batch import Batch, Step
from ...memory.phases import Phases
from ...memory.random_numbers import preserve_rng_state
from ...models.reference import FrozenCopy, ReferencePolicy, make_reference
from ...models.scorer import Scorer
from ...online.guard import FiniteGuard
from ...types import Mode
from ..callbacks import MovingReference, RunRecord
from ..model_card import Method
from ..uncalled import OverrideCheck
from . import resuming
from .base_config import BaseConfig
from .best_metric import BestMetricCheck
from .checkpointed_trainer import CheckpointedTrainer
from .keyword_arguments import StrictKeywordArguments
from .micro_batches import MicroBatchRunner
from .policy import (
    EvalDataset,
    Policy,
    TrainDataset,
    check_name,
    load_reference,
    router_coefficient,
)

if TYPE_CHECKING:
    from ...memory.callback import MemoryCallback

logger = logging.get_logger(__name__)


class LoopEvents(TrainerCallback):
    """Calls methods of a trainer, without arguments, at events of the loop."""

    def __init__(self, **methods: Callable[[], None]):
        for event, method in methods.items():
            setattr(self, event, lambda *_, _method=method, **__: _method())


class BaseTrainer(StrictKeywordArguments, OverrideCheck, BestMetricCheck, CheckpointedTrainer):
    """A training loop with a finite guard, metrics, measured phases and exact resumption.

    A subclass has an `algorithm`, and says how what its loader gives becomes the micro-batches of
    an optimizer step (`take_step`), and how these are scored (`score`).
    """

    method: ClassVar[Method]
    _moving_reference: MovingReference | None = None
    _memory_callback: "MemoryCallback | None" = None
    _options: dict[str, Any] | None = None  # that the algorithm has
    _prefix = ""  # of the metrics of the evaluation that is running

    def __init__(self, policy: Policy, args: BaseConfig, **options: Any):
        super().__init__(policy, args, **options)
        self.guard = FiniteGuard(self.ranks.rank, self.ranks.gather_objects)
        self.phases = Phases(args, args.device)
        self.runner = MicroBatchRunner(
            args, self.ranks, self.metrics["train"], self.model, self.phases
        )
        self.reference: ReferencePolicy | None = None
        self.add_callback(
            LoopEvents(
                on_train_begin=self._begin_training,
                on_epoch_begin=self.begin_epoch,
                on_pre_optimizer_step=self._check_update,
                on_step_end=self._end_update,
                on_epoch_end=self._end_epoch,
            )
        )
        from ..display import show_progress

        show_progress(self)
        self.add_callback(RunRecord(self.method.name))
        if args.log_memory:
            from ...memory.callback import MemoryCallback

            self._memory_callback = MemoryCallback(self.phases.meter, passes=False, metrics=False)
            self.add_callback(self._memory_callback)

    @cached_property
    def algorithm(self) -> Algorithm[Any]:
        """The algorithm, which `make_algorithm` has made."""
        return self.make_algorithm()

    def make_algorithm(self) -> Algorithm[Any]:
        """Make the algorithm of the options; called again when they have changed."""
        algorithm: Algorithm[Any] = self.args.make_algorithm()
        return algorithm

    def begin_epoch(self) -> None:
        """Called when an epoch begins; `data_position.epoch` is its number."""

    def end_epoch(self) -> None:
        """Called when an epoch of the data is over."""

    def check_update(self, step: int) -> None:
        """Called on every rank before update `step`, and after each evaluation batch."""

    def show(self, mode: Mode) -> None:
        """Show what a log holds besides numbers."""

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: object, **kwargs: object
    ) -> Any:
        """Train as `transformers.Trainer` does, from the start or an intact checkpoint.

        That is the newest in the output folder (`resume_from_checkpoint=True`) or that of a path;
        having none is an error. If this process fails, its error names its rank, and others end.
        If another run trains in the output folder, a `FolderInUseError` names it.
        """
        self.check_settings()
        try:
            with self.ranks.propagate_failures(), self.run_lock:
                found = self.find_checkpoint(resume_from_checkpoint)
                if found is None and self.is_world_process_zero():
                    resuming.warn_of_earlier_run(self.args.output_dir)
                return super().train(found, *args, **kwargs)
        finally:
            from ..display import close_progress

            close_progress(self.callback_handler.callbacks)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], None]:
        """Take the micro-batches of an optimizer step; transformers calls this once for each."""
        self.phases.begin_update()
        if self._memory_callback is not None:
            self._memory_callback.begin_step(self.state.global_step)
        inputs = list(islice(epoch_iterator, num_batches))
        self.load_random_state()
        self._follow_options()
        return (self.take_step(inputs, "train") if inputs else []), None

    def _follow_options(self) -> None:
        """Give the algorithm the options that a callback, say, has changed, such as `beta`."""
        options = dict(vars(self.args))
        if options != self._options:
            self._options = options
            self.algorithm = with_changed_options(self.algorithm, self.make_algorithm())

    def take_step(self, inputs: list[Any], mode: Mode) -> list[Batch]:
        """Turn what the loader gave for an optimizer step into its micro-batches.

        They have all columns that are computed without gradient, and the totals of the step. An
        evaluation batch is a step of its own.
        """
        raise NotImplementedError

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Add the gradient of a micro-batch to `.grad`; return its share () of the step's loss."""
        model.train()
        if hasattr(self.optimizer, "train"):  # of schedule-free optimizers
            self.optimizer.train()
        batch = self._prepare_inputs(inputs)  # which users may override
        forward_backward = partial(self._forward_backward, model)
        loss = self.runner.run(batch, forward_backward, partial(self.accelerator.no_sync, model))
        self.data_position.micro_steps += 1
        # The guard refuses such an update, or skips it; the mean in the log is then of the others.
        return torch.where(loss.isfinite(), loss, 0.0)

    def _forward_backward(self, model: nn.Module, chunk: Batch) -> Tensor:
        """Compute the loss () of a chunk and its gradient.

        Losses are shares of the step's loss, so those of chunks and micro-batches add up.
        """
        with self.compute_loss_context_manager():
            loss: Tensor = self.compute_loss(model, chunk)
        empty_every = self.args.torch_empty_cache_steps
        if empty_every is not None and self.state.global_step % empty_every == 0:
            clear_device_cache()
        options: dict[str, Any] = {}
        if self.args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO):
            options["learning_rate"] = self.lr_scheduler.get_last_lr()[0]  # they step in backward
        if self.is_deepspeed_enabled:
            options["scale_wrt_gas"] = False
        self.accelerator.backward(loss, **options)
        return loss.detach()

    def score(self, model: nn.Module, batch: Batch) -> tuple[Batch, Any]:
        """Score a chunk with gradient; return it with added columns, and what the loss reads."""
        raise NotImplementedError

    def loss(self, scores: Any, batch: Batch) -> LossTerms:
        """Return the terms of the loss of a chunk: of each the sum, and its total over the step."""
        return self.algorithm.loss(scores, batch, self.metrics[batch.mode])

    def credit(self, step: Step) -> Step:
        """Add columns that depend on all rows of a step, once all scores without gradient exist."""
        return self.algorithm.credit(step, self.metrics[step.mode])

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Return the share () of a chunk in the loss of its optimizer step, times the ranks.

        Shares of chunks and micro-batches add up to the loss of the step; ranks take the mean.
        """
        if return_outputs:
            raise ValueError(
                "return_outputs=True cannot be used: logits are never held as a whole, and rows "
                "are not padded."
            )
        with self.phases("forward"):
            batch, scores = self.score(model, inputs)
        terms = dict(self.loss(scores, batch))
        aux_loss = getattr(scores, "aux_loss", None)
        if aux_loss is not None:
            # A mean over what one forward pass routes, not a sum over rows.
            weighted = self.router_coefficient * aux_loss * len(batch.units)
            terms["aux_loss"] = weighted, batch.totals.all_units
            self.metrics[batch.mode].value("aux_loss", aux_loss)
        self.record_loss(terms, batch.mode)
        shares = [divide(term) for term in terms.values()]
        return torch.stack(shares).sum() * self.ranks.count

    def record_loss(self, terms: LossTerms, mode: Mode) -> None:
        """Record the loss of a chunk, beyond the mean over batches that transformers logs."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> Any:
        """Look at the gradient before the optimizer does: the one place that waits for it."""
        norm = super()._get_grad_norm(model, grad_norm)
        is_finite = bool(torch.isfinite(torch.as_tensor(norm)))
        # With a loss scaler an infinite gradient is its signal to lower the scale.
        if is_finite or self.accelerator.scaler is not None:
            self.guard.forget()
        else:
            self._refuse_gradient(model)
        if self.args.non_finite == "skip":
            self.metrics["train"].value("frac_skipped_updates", float(not is_finite))
        return norm

    def _refuse_gradient(self, model: nn.Module) -> None:
        """Raise what explains a gradient that is not finite, or have its update skipped."""
        error = self.guard.reason(self.state.global_step + 1)
        if self.args.non_finite == "raise":
            raise error
        logger.warning(f"{error} This update is skipped.")
        if not self.is_deepspeed_enabled:  # which has left such an update out by itself
            model.zero_grad(set_to_none=True)  # so that the optimizer leaves weights alone

    def _check_update(self) -> None:
        self.check_update(self.state.global_step + 1)

    def _end_update(self) -> None:
        self.runner.done.clear()
        seconds, peaks = self.phases.end_update()
        self.metrics["train"].value("step_time", seconds)
        for name, value in peaks.items():
            self.metrics["train"].maximum(name, value)

    def floating_point_ops(self, inputs: Batch) -> int:
        """Estimate those of the latest micro-batch; see `MicroBatchRunner.run`."""
        return self.runner.operations

    def read_checkpoint(self, folder: str) -> None:
        """Continue with the weights of a reference that moves."""
        if self._moving_reference is not None:
            self._moving_reference.read(folder, self.ranks)

    def write_checkpoint(self, folder: str) -> None:
        """Write the weights of a reference that moves."""
        if self._moving_reference is not None:
            on_each_node = self.args.save_on_each_node
            self._moving_reference.write(folder, self.args.should_save, on_each_node)

    def drop_update(self) -> None:
        """Drop the micro-batches of an update that was not finished."""
        self.runner.drop_update()

    def _end_epoch(self) -> None:
        if self.runner.done:
            logger.warning(
                f"The last {len(self.runner.done)} micro-batches of the stream are not trained on: "
                f"an update takes {self.args.gradient_accumulation_steps}."
            )
            self.runner.drop_update()
        if not self.control.should_training_stop:
            self.data_position.epoch += 1
            self.data_position.micro_steps = 0
            self.end_epoch()

    def evaluate(
        self,
        eval_dataset: EvalDataset = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Evaluate as `transformers.Trainer` does; training continues as if nothing happened."""
        check_name(eval_dataset, self.eval_dataset)
        with self._evaluating(metric_key_prefix):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: TrainDataset,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> Any:
        """Evaluate another dataset. Metrics are returned and not logged."""
        with self._evaluating(metric_key_prefix):
            output = super().predict(test_dataset, ignore_keys, metric_key_prefix)
            self._add_collected(output.metrics)
        self.show("eval")
        return output

    @contextmanager
    def _evaluating(self, prefix: str) -> Iterator[None]:
        outer, self._prefix = self._prefix, f"{prefix}_"
        self.data_position.eval_batches = 0
        try:
            with self.ranks.propagate_failures(), preserve_rng_state():
                yield
        finally:
            self._prefix = outer

    def prediction_step(
        self, model: nn.Module, inputs: Any, *others: object, **options: object
    ) -> tuple[Tensor, None, None]:
        """Compute the loss () of one evaluation batch, without predictions and labels."""
        with torch.no_grad():
            (batch,) = self.take_step([inputs], "eval")
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, batch)
        self.guard.check(self.state.global_step)
        self.data_position.eval_batches += 1
        self.check_update(self.state.global_step)
        return loss.mean().detach(), None, None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the collected metrics to `logs` and write them."""
        mode = self._add_collected(logs)
        super().log(logs, start_time)
        self.show(mode)

    def _add_collected(self, logs: dict[str, float]) -> Mode:
        mode: Mode = "eval" if self._prefix else "train"
        if collected := self.metrics[mode].flush(self.ranks.gather_objects):
            logs.update({self._prefix + name: value for name, value in collected.items()})
            logs[self._prefix + "num_tokens"] = float(self.state.num_input_tokens_seen)
        return mode

    def logs_next(self, mode: Mode) -> bool:
        """Whether metrics are logged after the update that is being computed."""
        if mode == "eval" or self.args.logging_strategy == "epoch":
            return True
        after = replace(self.state, global_step=self.state.global_step + 1)
        return DefaultFlowCallback().on_step_end(self.args, after, TrainerControl()).should_log

    def _make_scorer(self, temperature: float = 1.0) -> None:
        args, self.router_coefficient = self.args, router_coefficient(self.model, self.args)
        self.scorer = Scorer(
            pad_id=self.processing_class.pad_token_id,
            temperature=temperature,
            device=args.device,
            pad_multiple=args.pad_to_multiple_of,
            router_logits=self.router_coefficient != 0.0,
            shared_prefix=args.shared_prefix,
            chunk=args.logits_chunk_size,
        )
        self.runner.reset_hooks.append(self.scorer.forget)

    def _make_reference(self, given: str | nn.Module | None, model: str | nn.Module) -> None:
        given = load_reference(given, model, self.args)
        reference = make_reference(self.model, self._had_adapter, given)
        if isinstance(reference, FrozenCopy) and not self.args.sync_ref_model:
            known = resuming.fingerprint(dict(reference.model.named_parameters()))
            self.run_facts["the reference's weights (fingerprint)"] = known
        self.reference = reference.prepare(self.accelerator)
        if self.args.sync_ref_model:
            self._moving_reference = MovingReference(self.reference, self.accelerator)
            self.add_callback(self._moving_reference)
