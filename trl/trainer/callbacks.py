"""Callbacks for any `transformers.Trainer`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..distributed import fsdp_version
from ..imports import require
from ..models.reference import frozen_pairs
from ..models.sharded import local_shard, release

# What people look at while a run goes on, and the names it is logged under.
SHOWN = {"reward": "reward", "loss": "loss", "length": "completions/mean_length"}


class SyncRefModelCallback(TrainerCallback):
    """Moves a reference model towards the policy every so many optimizer steps (TR-DPO).

    reference <- alpha * policy + (1 - alpha) * reference, with `alpha` from
    `args.ref_model_mixup_alpha`, whenever `global_step` is a multiple of
    `args.ref_model_sync_steps` (arXiv 2404.09656).

    Args:
        ref_model (`nn.Module`): the reference; changed in place.
        accelerator (`Accelerator`): unwraps the policy.
    """

    def __init__(self, ref_model: nn.Module, accelerator: Accelerator):
        self.ref_model = ref_model
        self.accelerator = accelerator

    @torch.no_grad()
    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Blend the weights if a sync is due."""
        if state.global_step % args.ref_model_sync_steps:
            return
        # Both are sharded alike, so each rank blends its own parts.
        for model in (kwargs["model"], self.ref_model):
            release(model)
        for parameter, source in self._pairs(self.accelerator.unwrap_model(kwargs["model"])):
            target, wanted = local_shard(parameter), local_shard(source)
            target.lerp_(wanted.to(target.device, target.dtype), args.ref_model_mixup_alpha)

    def _pairs(self, policy: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Each weight of the reference, with that of the policy."""
        weights = dict(policy.named_parameters())
        reference = self.accelerator.unwrap_model(self.ref_model)
        for name, parameter in reference.named_parameters():
            yield parameter, weights[name]


class SyncRefAdapterCallback(SyncRefModelCallback):
    """The same where the reference is a frozen copy of an adapter, which is part of the policy.

    The factors of the adapters are blended, not the changes of weights that they stand for.

    Raises:
        ValueError: under FSDP1, which cuts trained and frozen weights at different places.
    """

    def __init__(self, ref_model: nn.Module, accelerator: Accelerator):
        super().__init__(ref_model, accelerator)
        if fsdp_version(accelerator) == 1:
            raise ValueError(
                "sync_ref_model=True: FSDP1 divides the copy of an adapter in another way than the "
                "adapter, so the copy cannot follow it. Train under FSDP2 (--accelerate_config "
                "fsdp2) or ZeRO-3 (--accelerate_config zero3), or leave the option out."
            )

    def _pairs(self, policy: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return frozen_pairs(policy)


class PlainProgressCallback(TrainerCallback):
    """Prints a line for each log and each evaluation: progress for files and batch systems."""

    def __init__(self) -> None:
        self._first = 0  # step at which this call of `train` began
        self._started = time.monotonic()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock."""
        self._first, self._started = state.global_step, time.monotonic()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Print that the first step is done, which may be long before the first log."""
        if state.global_step == self._first + 1 and not control.should_log:
            self._print(state, [])

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Print reward, loss and length of the steps since the last log."""
        words = _shown(logs or {})
        if words:
            self._print(state, words)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Print what an evaluation found."""
        if state.is_world_process_zero:
            print(_evaluated(state, metrics or {}), flush=True)

    def _print(self, state: TrainerState, words: list[str]) -> None:
        if not state.is_world_process_zero:
            return
        seconds = time.monotonic() - self._started
        done = max(1, state.global_step - self._first)
        left = seconds / done * (state.max_steps - state.global_step)
        clock = f"{_clock(seconds)} elapsed, {_clock(left)} left"
        print("  ".join([_step(state), *words, clock]), flush=True)


class RichProgressCallback(TrainerCallback):
    """Shows training and evaluation as rich bars with remaining time, and the latest metrics.

    For a terminal; `close` must be called before anything else is shown after an error.

    Raises:
        ImportError: if rich is not installed.
    """

    def __init__(self) -> None:
        self._progress = require("rich.progress", "RichProgressCallback")
        self._console = require("rich.console", "RichProgressCallback").Console()
        self._bars: Any = None
        self._training: Any = None
        self._evaluation: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the training bar on the main process."""
        if not state.is_world_process_zero:
            return
        self._open()
        self._training = self._bars.add_task("training", total=state.max_steps, note="")
        self._bars.update(self._training, completed=state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Advance the training bar."""
        if self._training is not None:
            self._bars.update(self._training, completed=state.global_step)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Advance the evaluation bar, opening it at the first batch."""
        if not state.is_world_process_zero:
            return
        if self._evaluation is None:
            self._open()
            loader: Any = kwargs.get("eval_dataloader")
            total = len(loader) if hasattr(loader, "__len__") else None
            self._evaluation = self._bars.add_task("evaluation", total=total, note="")
        self._bars.advance(self._evaluation)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Replace the evaluation bar by a line that says what was found."""
        if not state.is_world_process_zero:
            return
        if self._evaluation is not None:
            self._bars.remove_task(self._evaluation)
            self._evaluation = None
            self._close_if_idle()
        self._console.print(_evaluated(state, metrics or {}), markup=False, highlight=False)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show reward, loss and length beside the bar."""
        if self._training is None or not logs:
            return
        words = _shown(logs)
        if words:
            self._bars.update(self._training, note="  ".join(words))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the training bar."""
        self._training = None
        self._close_if_idle()

    def close(self) -> None:
        """Stop drawing, whatever is still going on."""
        self._training = self._evaluation = None
        self._close_if_idle()

    def _open(self) -> None:
        if self._bars is None:
            p = self._progress
            self._bars = p.Progress(
                p.TextColumn("{task.description}"),
                p.BarColumn(),
                p.MofNCompleteColumn(),
                p.TimeElapsedColumn(),
                p.TextColumn("ETA"),
                p.TimeRemainingColumn(),
                p.TextColumn("{task.fields[note]}"),
                console=self._console,
            )
            self._bars.start()

    def _close_if_idle(self) -> None:
        if self._bars is not None and self._training is None and self._evaluation is None:
            self._bars.stop()
            self._bars = None


def _shown(metrics: dict[str, Any], prefix: str = "") -> list[str]:
    names = {word: prefix + key for word, key in SHOWN.items()}
    return [f"{word} {metrics[key]:.3g}" for word, key in names.items() if key in metrics]


def _evaluated(state: TrainerState, metrics: dict[str, float]) -> str:
    """What an evaluation of a dataset, or of one of several (`eval_name_...`), found."""
    (prefix,) = [x.removesuffix("runtime") for x in metrics if x.endswith("_runtime")] or ["eval_"]
    name = prefix.removeprefix("eval").strip("_")
    title = f"evaluation of {name}:" if name else "evaluation:"
    return "  ".join([_step(state), title, *_shown(metrics, prefix)])


def _step(state: TrainerState) -> str:
    return f"step {state.global_step}/{state.max_steps}"


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
