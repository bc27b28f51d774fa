"""Where the online skeleton hooks into the loop of `transformers.Trainer`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.utils import logging

from ...data.sampler import RepeatIterableDataset, RepeatSampler
from ...distributed import Ranks
from ...memory.callback import MemoryCallback
from ...online.completions import CompletionLog, print_table, tracker_rows
from ...online.guard import FiniteGuard, NonFiniteError
from ...online.metrics import MetricStore
from ...online.reports import Reports, Round
from ...random_numbers import random_numbers_kept
from ...types import Generations, Prompts, RewardTable
from ..base.phases import Phases
from ..base.trackers import log_table
from ..callbacks import show_progress
from .batch_math import check_eval_groups
from .loop_state import StatefulLoop
from .online_setup import check_dataset, reading_in_this_process

logger = logging.get_logger(__name__)


class OnlineLoop(StatefulLoop):
    """Loaders that repeat prompts, step counting, the finite check, evaluation and reports."""

    def _build_loop(self) -> None:
        args = self.args
        # Otherwise rank 0 would read streams for all ranks, and send batches of text as tensors.
        self.accelerator.dataloader_config.dispatch_batches = False
        self.ranks = Ranks(self.accelerator)
        self.completions = CompletionLog(args.output_dir, self.is_world_process_zero())
        self.reports = Reports(self.completions, self.ranks)
        self.metrics = self.reports.metrics
        self.guard = FiniteGuard(self.ranks.rank, self.ranks.gather_objects)
        self.phases = Phases(args, self.ranks, self.metrics["train"])
        self._reset_counts()
        self._eval_batch = 0
        self._sampler: RepeatSampler | RepeatIterableDataset | None = None
        self.add_callback(_LoopCallback(self))
        show_progress(self)
        if args.log_memory:
            meter = self.phases.meter
            self.add_callback(MemoryCallback(meter, passes=False, metrics=False))

    @property
    def mode(self) -> str:
        """`"train"` or `"eval"`."""
        return "train" if self.model.training else "eval"

    @property
    def store(self) -> MetricStore:
        """Where metrics of the current mode are collected."""
        return self.metrics[self.mode]

    @property
    def group_size(self) -> int:
        """Completions for each prompt in the current mode."""
        return self.args.num_generations if self.model.training else self.args.eval_group_size

    @property
    def reports_this_step(self) -> bool:
        """Whether metrics are logged after the update that is being computed."""
        strategy = self.args.logging_strategy
        if not self.model.training or strategy == "epoch":
            return True
        number = self.state.global_step + 1
        first = self.args.logging_first_step and number == 1
        return strategy == "steps" and (first or number % max(1, self.state.logging_steps) == 0)

    # --- Loaders ---

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader whose batches are the rows of one round on this rank."""
        plan, dataset = self.args.batch_plan, self.train_dataset
        if isinstance(dataset, TorchIterableDataset):
            if self.args.shuffle_dataset:
                dataset = dataset.shuffle(seed=self.args.seed)
            dataset = self._sampler = RepeatIterableDataset(
                dataset,
                plan.group_size,
                plan.round_rows // plan.group_size,
                plan.micro_steps_per_round,
            )
        return self._get_dataloader(
            dataset=dataset,
            description="Training",
            batch_size=plan.rows_per_rank,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> RepeatSampler:
        plan = self.args.batch_plan
        self._sampler = RepeatSampler(
            self.train_dataset if train_dataset is None else train_dataset,
            mini_repeat_count=plan.group_size,
            batch_size=plan.round_rows // plan.group_size,
            repeat_count=plan.micro_steps_per_round,
            shuffle=bool(self.args.shuffle_dataset),
            seed=self.args.seed,
        )
        return self._sampler

    def _get_eval_sampler(self, eval_dataset: Any) -> RepeatSampler:
        return RepeatSampler(
            eval_dataset, mini_repeat_count=self.args.eval_group_size, seed=self.args.seed
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return a loader that repeats each evaluation prompt for its group."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        elif eval_dataset is None:
            eval_dataset = self.eval_dataset
        if eval_dataset is not None:
            check_dataset("eval_dataset", eval_dataset)
            eval_dataset = self.encode.check("eval_dataset", eval_dataset)
        if isinstance(eval_dataset, TorchIterableDataset):
            eval_dataset = RepeatIterableDataset(eval_dataset, self.args.eval_group_size, 1, 1)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Return the loader of `predict`: like that of an evaluation."""
        return self.get_eval_dataloader(test_dataset)

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> DataLoader:
        if not isinstance(dataset, TorchIterableDataset):
            return super()._get_dataloader(dataset, *args, **kwargs)
        with reading_in_this_process(self.args):
            return super()._get_dataloader(dataset, *args, **kwargs)

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["prompt", "chat_template_kwargs"]

    # --- Training ---

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        place = super()._init_training_state(*args)
        self.completions.restart(self.state.global_step)
        return place

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; if this process fails, its error names its rank, and the others end with it."""
        with self.ranks.ending_together():
            return super().train(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Train on one micro-batch, counting steps and seconds."""
        if self._substep == 0:
            self._started = time.perf_counter()
        model.train()
        loss = self.phases.train(
            self._prepare_inputs(inputs), partial(super().training_step, model), self._undo_update
        )
        self._step += 1
        self._substep += 1
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Look at the gradient before the optimizer does: the one place that waits for it."""
        norm = super()._get_grad_norm(model, grad_norm)
        finite = bool(torch.isfinite(torch.as_tensor(norm)))
        # With a loss scaler an infinite gradient is its signal to lower the scale.
        if finite or self.accelerator.scaler is not None:
            self.guard.forget()
        else:
            self._refuse_update(model)
        if self.args.non_finite == "skip":
            self.metrics["train"].value("frac_skipped_updates", float(not finite))
        return norm

    def _refuse_update(self, model: nn.Module) -> None:
        """Stop, or take the gradients away so that the optimizer leaves the weights alone."""
        step = self.state.global_step + 1
        try:
            self.guard.check(step)
            raise NonFiniteError(
                f"Step {step}: the gradient is NaN or infinite on rank {self.ranks.rank}, though "
                "all log-probabilities are finite; look at rewards and advantages."
            )
        except NonFiniteError as error:
            if self.args.non_finite == "raise":
                raise
            logger.warning(f"{error} This update is skipped.")
        if not self.is_deepspeed_enabled:  # it has left such an update out by itself
            model.zero_grad(set_to_none=True)

    def floating_point_ops(self, inputs: Any) -> int:
        """Rows have no token count before they are encoded, so nothing is counted."""
        return 0

    # --- Evaluation ---

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as `transformers.Trainer` does, after checking that batches hold groups."""
        with self._evaluating():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate another dataset. Metrics, with rewards, are returned and not logged."""
        with self._evaluating():
            output = super().predict(*args, **kwargs)
        self._add_collected(output.metrics)
        self._show_completions("eval")
        return output

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        check_eval_groups(
            self.args.per_device_eval_batch_size, self.ranks.count, self.args.eval_group_size
        )
        self._eval_batch = 0
        # Training goes on as if nothing had been evaluated.
        with self.ranks.ending_together(), random_numbers_kept():
            yield

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, None, None]:
        """Generate, reward and compute the loss of one evaluation batch."""
        with torch.no_grad():
            batch = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, batch)
        self.guard.check(self.state.global_step)
        self._eval_batch += 1
        return loss.mean().detach(), None, None

    # --- Reports ---

    def report_round(
        self,
        prompts: Prompts,
        completions: list[Any],
        generations: Generations,
        credit: tuple[RewardTable, dict[str, list[Any]], Tensor],
    ) -> None:
        """Record metrics of a round and write its completions.

        Args:
            prompts, completions, generations: the rows of this rank.
            credit: rewards of all ranks, extra columns of this rank, advantages of all ranks.
        """
        table, extras, advantages = credit
        tokens = self.reports.add(
            self.mode,
            Round(
                step=self.state.global_step,
                number=self._round_number(),
                prompts=prompts,
                completions=completions,
                generations=generations,
                table=table,
                extras=extras,
                advantages=advantages,
            ),
        )
        if self.model.training:
            self.state.num_input_tokens_seen += tokens

    def _round_number(self) -> int:
        if self.mode == "eval":
            return self._eval_batch
        return self._substep // self.args.batch_plan.micro_steps_per_round

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the collected metrics to `logs`, write them, and show completions if asked to."""
        mode = self._add_collected(logs)
        super().log(logs, start_time)
        self._show_completions(mode)

    def _add_collected(self, logs: dict[str, float]) -> str:
        """Move what was collected in the mode that `logs` are of into them; returns the mode."""
        prefix = _eval_prefix(logs)
        mode = "eval" if prefix else "train"
        collected = self.reports.flush(mode)
        if collected:
            logs.update({prefix + name: value for name, value in collected.items()})
            logs[prefix + "num_tokens"] = float(self.state.num_input_tokens_seen)
            if mode == "train":
                logs.update(self.encode.counts())
        return mode

    def _show_completions(self, mode: str) -> None:
        records = self.completions.take(mode)
        if self.args.log_completions and records and self.is_world_process_zero():
            print_table(records, self.state.global_step, self.args.num_completions_to_print)
            log_table(self.args.report_to, *tracker_rows(records, self.args.log_unique_prompts))


def _eval_prefix(logs: dict[str, float]) -> str:
    """The prefix of an evaluation's metrics ("eval_", "eval_name_"), empty for training."""
    for name in logs:
        if name.endswith("_runtime") and name != "train_runtime":
            return name.removesuffix("runtime")
    return "eval_" if any(name.startswith("eval_") for name in logs) else ""


class _LoopCallback(TrainerCallback):
    """Tells the trainer what the loop of transformers does."""

    def __init__(self, trainer: OnlineLoop):
        self._trainer = trainer

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer._restore()
        if state.is_world_process_zero:
            print(args.batch_plan.describe(), flush=True)

    def on_epoch_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._trainer._sampler is not None:
            self._trainer._sampler.set_epoch(self._trainer._epoch)

    def on_epoch_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer._end_epoch(stays=control.should_training_stop)

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = self._trainer
        # Devices work behind: looking at the gradient's norm has waited for all of the backward.
        trainer.metrics["train"].value("step_time", time.perf_counter() - trainer._started)
        trainer._substep = 0
        trainer.phases.end_update()
