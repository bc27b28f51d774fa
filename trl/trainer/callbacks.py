"""Callbacks for any `transformers.Trainer`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainerControl, TrainerState

from ..distributed import fsdp_version
from ..imports import is_available, require
from ..models.reference import frozen_pairs
from ..models.sharded import local_shard, release
from ..progress import Activity, watched
from ..text import count

# What people look at while a run goes on, and the names it is logged under. The loss of a policy
# gradient says nothing about progress, so it is shown only where there is no reward.
SHOWN = {"reward": "reward", "kl": "kl", "length": "completions/mean_length"}
SHOWN_WITHOUT_REWARD = {"loss": "loss"}

DOING = {
    "generation": "generating",
    "scoring": "scoring",
    "rewards": "computing rewards",
    "forward": "training",
    "backward": "training",
}
QUIET = 60.0  # seconds after which a line says what a step is doing, where there is no terminal
NARROWEST_BAR, WIDEST_BAR = 6, 30  # columns


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


class _Progress:
    """How far a run is, how fast it goes, and what it is doing."""

    def __init__(self, state: TrainerState):
        self.state = state
        self.first = state.global_step
        self.activity = Activity("")
        self.metrics: list[str] = []
        self._started = time.monotonic()
        self._updated = self._started

    def advance(self) -> None:
        """A step is done."""
        self._updated = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def remaining(self) -> float | None:
        """Seconds left, from the mean of all steps of this run; None before the first is done."""
        done = self.state.global_step - self.first
        if not done:
            return None
        seconds = (self._updated - self._started) / done
        since = time.monotonic() - self._updated
        return max(0.0, seconds * (self.state.max_steps - self.state.global_step) - since)

    def doing(self) -> str:
        """Such as "generating 12/64"."""
        now = self.activity
        words = DOING.get(now.name, now.name)
        if not now.rows:
            return words
        return f"{words} {now.done}/{now.rows}" if now.done else f"{words} {count(now.rows, 'row')}"


class _ProgressCallback(TrainerCallback):
    """Follows training on the main process; displays say how it is shown."""

    def __init__(self) -> None:
        self._training: _Progress | None = None
        self._watching = ExitStack()

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Start the clock, and say at which step a resumed run goes on."""
        if state.is_world_process_zero:
            if state.global_step:
                self._say([_step(state), "resumed"])
            self._training = _Progress(state)
            self._watching.enter_context(watched(self._follow))

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Measure the speed."""
        if self._training is not None:
            self._training.advance()

    def on_evaluate(
        self, args: Any, state: TrainerState, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Say what an evaluation found."""
        if state.is_world_process_zero:
            self._say(_evaluated(state, metrics or {}))

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Stop the clock."""
        self.close()

    def close(self) -> None:
        """Show nothing more, whatever is still going on."""
        self._watching.close()
        self._training = None

    def _follow(self, activity: Activity) -> None:
        if self._training is not None:
            self._training.activity = activity

    def _say(self, words: Iterable[str]) -> None:
        print("  ".join(words), flush=True)


class PlainProgressCallback(_ProgressCallback):
    """Prints a line for each log and each evaluation: progress for files and batch systems.

    During the first step it also prints which phase begins, and later what a step is doing when it
    takes longer than a minute.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told: set[str] = set()
        self._said = time.monotonic()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Print that the first step is done, which may be long before the first log."""
        super().on_step_end(args, state, control)
        now = self._training
        if now is not None and state.global_step == now.first + 1 and not control.should_log:
            self._say_step(now, [])

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        """Print reward, KL and length, or the loss, of the steps since the last log."""
        words = _shown(logs or {})
        if words and self._training is not None:
            self._say_step(self._training, words)

    def _follow(self, activity: Activity) -> None:
        super()._follow(activity)
        now = self._training
        if now is None:
            return
        state, words = now.state, DOING.get(activity.name, activity.name)
        is_new = state.global_step == now.first and words not in self._told
        if is_new or time.monotonic() - self._said > QUIET:
            self._told.add(words)
            self._say([f"step {state.global_step + 1}/{state.max_steps}", now.doing()])

    def _say_step(self, now: _Progress, words: list[str]) -> None:
        left = now.remaining()
        clock = f"{_clock(now.elapsed)} elapsed"
        clock += "" if left is None else f", {_clock(left)} left"
        self._say([_step(now.state), *words, clock])

    def _say(self, words: Iterable[str]) -> None:
        self._said = time.monotonic()
        super()._say(words)


class RichProgressCallback(_ProgressCallback):
    """Shows in one line of a terminal how far training is, what it is doing, and the last metrics.

    The line is drawn anew for the width that the terminal has: step and remaining time first, then
    phase, metrics and a bar where there is room. `close` must be called before anything else is
    shown after an error; the trainers of this package do so.

    Raises:
        ImportError: if rich is not installed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live = require("rich.live", "RichProgressCallback")
        self._text = require("rich.text", "RichProgressCallback").Text
        self._console = require("rich.console", "RichProgressCallback").Console()
        self._drawing: Any = None
        self._evaluation: tuple[int, int | None] | None = None  # batches done, and of how many

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Begin to draw on the main process."""
        super().on_train_begin(args, state, control)
        if self._training is not None:
            self._open()

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        """Count the batches of an evaluation."""
        if not state.is_world_process_zero:
            return
        if self._evaluation is None:
            loader: Any = kwargs.get("eval_dataloader")
            self._evaluation = 0, len(loader) if hasattr(loader, "__len__") else None
            self._open()
        done, total = self._evaluation
        self._evaluation = done + 1, total

    def on_evaluate(
        self, args: Any, state: TrainerState, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Print a line that says what was found."""
        self._evaluation = None
        if self._training is None:
            self.close()
        super().on_evaluate(args, state, control, metrics)

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        """Show reward, KL and length, or the loss."""
        if self._training is not None:
            self._training.metrics = _shown(logs or {}) or self._training.metrics

    def close(self) -> None:
        """Stop drawing, whatever is still going on."""
        self._follow(Activity(""))
        if self._drawing is not None:
            self._drawing.stop()  # draws the line once more
        self._drawing = self._evaluation = None
        super().close()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield self._text(self._line(options.max_width), no_wrap=True, overflow="ellipsis")

    def _line(self, width: int) -> str:
        """What is shown, the more the wider the terminal is."""
        parts = []  # text, and how important it is: 0 comes first
        if self._training is not None:
            now = self._training
            left = now.remaining()
            parts = [
                (_step(now.state), 0),
                (f"ETA {'-' if left is None else _clock(left)}", 1),
                (now.doing(), 2),
                ("  ".join(now.metrics), 3),
                (f"{_clock(now.elapsed)} elapsed", 4),
            ]
        if self._evaluation is not None:
            done, total = self._evaluation
            parts.insert(1, (f"evaluation {done}/{'?' if total is None else total}", -1))
        kept = _fitting([part for part in parts if part[0]], width)
        room = width - len("  ".join(kept)) - 2
        if self._training is not None and room >= NARROWEST_BAR:
            kept.insert(1, _bar(self._training.state, min(room, WIDEST_BAR)))
        return "  ".join(kept)

    def _say(self, words: Iterable[str]) -> None:
        self._console.print("  ".join(words), markup=False, highlight=False)

    def _open(self) -> None:
        if self._drawing is None:
            self._drawing = self._live.Live(self, console=self._console, refresh_per_second=4)
            self._drawing.start()


def show_progress(trainer: Trainer) -> None:
    """Replace the bar of transformers: by one line in a terminal, by plain lines elsewhere.

    Nothing changes where the bar was switched off, in notebooks, or in a terminal without rich.
    """
    shows_bar = any(type(x) is ProgressCallback for x in trainer.callback_handler.callbacks)
    in_terminal = sys.stdout.isatty()
    if shows_bar and (is_available("rich") or not in_terminal):
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(RichProgressCallback() if in_terminal else PlainProgressCallback())


def close_progress(callbacks: Iterable[TrainerCallback]) -> None:
    """Stop the displays among the callbacks, so that other text can be shown."""
    for callback in callbacks:
        if isinstance(callback, _ProgressCallback):
            callback.close()


def _fitting(parts: list[tuple[str, int]], width: int) -> list[str]:
    """As many texts as there is room for, the most important ones, in their order."""
    kept: list[tuple[str, int]] = []
    for part in sorted(parts, key=lambda part: part[1]):
        if kept and len("  ".join(text for text, _ in [*kept, part])) > width:
            break
        kept.append(part)
    return [text for text, _ in parts if any(text == other for other, _ in kept)]


def _bar(state: TrainerState, width: int) -> str:
    full = round(width * state.global_step / max(1, state.max_steps))
    return "━" * full + "─" * (width - full)


def _shown(metrics: dict[str, Any], prefix: str = "") -> list[str]:
    """Names and values; a value that is missing or NaN, as of rewards that are all None, is "-"."""
    names = SHOWN if f"{prefix}reward" in metrics else SHOWN_WITHOUT_REWARD
    found = {word: metrics[prefix + key] for word, key in names.items() if prefix + key in metrics}
    return [f"{word} {_number(value)}" for word, value in found.items()]


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3g}"


def _evaluated(state: TrainerState, metrics: dict[str, float]) -> list[str]:
    """What an evaluation of a dataset, or of one of several (`eval_name_...`), found."""
    (prefix,) = [x.removesuffix("runtime") for x in metrics if x.endswith("_runtime")] or ["eval_"]
    name = prefix.removeprefix("eval").strip("_")
    title = f"evaluation of {name}:" if name else "evaluation:"
    return [_step(state), title, *_shown(metrics, prefix)]


def _step(state: TrainerState) -> str:
    return f"step {state.global_step}/{state.max_steps}"


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
