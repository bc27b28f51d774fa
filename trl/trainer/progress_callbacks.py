"""Displays of a run in progress, for files and terminals: logged values, and how far it is."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from ..imports import require
from ..memory.progress import Activity, report_progress_to
from ..number_format import format_metric, pluralize

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

# Names shown, in this order, and the metrics that each may stand for.
SHOWN = {
    "loss": ("loss",),
    "lr": ("learning_rate",),
    "grad_norm": ("grad_norm",),
    "reward": ("reward",),
    "accuracy": ("accuracy", "rewards/accuracies", "mean_token_accuracy"),
    "kl": ("kl",),
    "length": ("completions/mean_length",),
}

DOING = {"generation": "generating", "rewards": "computing rewards"}
DOING |= dict.fromkeys(("forward", "backward"), "training")
QUIET = 60.0  # seconds after which a line says what a step is doing, where there is no terminal
NARROWEST_BAR = 6  # columns
WIDEST_BAR = 30


class ProgressDisplay(TrainerCallback):
    """Follows training on the main process: how far it is, how fast it goes, what it is doing."""

    def __init__(self) -> None:
        self._state: TrainerState | None = None  # while a run goes on
        self._watching = ExitStack()
        self._first_step = 0  # where this run began
        self._started = 0.0
        self._updated = 0.0
        self._activity = Activity("")

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Start the clock."""
        if state.is_world_process_zero:
            self._state = state
            self._first_step = state.global_step
            self._started = self._updated = time.monotonic()
            self._watching.enter_context(report_progress_to(self._follow))

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self._updated = time.monotonic()

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        metrics: dict[str, float],
        **kwargs: object,
    ) -> None:
        if state.is_world_process_zero:
            # Those of one of several datasets are called `eval_NAME_...`.
            (prefix,) = [x.removesuffix("runtime") for x in metrics if x.endswith("_runtime")]
            name = prefix.removeprefix("eval").strip("_")
            title = f"evaluation of {name}" if name else "evaluation"
            self._show(state, shown_metrics(metrics, prefix), title)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, float],
        **kwargs: object,
    ) -> None:
        """Show loss, learning rate, reward and the like of the steps since the last log."""
        shown = shown_metrics(logs)
        if shown and self._state is not None:
            self._show(self._state, shown)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Show nothing more, whatever is still going on."""
        self._watching.close()
        self._state = None

    def _follow(self, activity: Activity) -> None:
        self._activity = activity

    def _show(self, state: TrainerState, metrics: dict[str, str], title: str = "") -> None:
        """Show metrics of training, or of an evaluation with this title."""
        heading = [f"{title}:"] if title else []
        self._print([_step(state), *heading, *(f"{name} {x}" for name, x in metrics.items())])

    def _print(self, texts: Iterable[str]) -> None:
        print("  ".join(texts), flush=True)

    def _elapsed(self) -> str:
        return f"{_clock(time.monotonic() - self._started)} elapsed"

    def _left(self, state: TrainerState) -> str:
        """Time left, from the mean of all steps of this run; "-" before the first is done."""
        if state.global_step == self._first_step:
            return "-"
        seconds = (self._updated - self._started) / (state.global_step - self._first_step)
        end = self._updated + seconds * (state.max_steps - state.global_step)
        return _clock(max(0.0, end - time.monotonic()))

    def _doing(self) -> str:
        """Return a text such as "generating 12/64"."""
        now = self._activity
        rows = f" {now.done}/{now.rows}" if now.done else f" {pluralize(now.rows, 'row')}"
        return DOING.get(now.name, now.name) + (rows if now.rows else "")


class PlainProgressCallback(ProgressDisplay):
    """Prints a line for each log and each evaluation: progress for files and batch systems.

    During the first step it also prints which phase begins, and later what a step is doing when it
    takes longer than a minute.
    """

    def __init__(self) -> None:
        super().__init__()
        self._announced_phases: set[str] = set()
        self._printed = time.monotonic()  # when the latest line was printed

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Print that the first step is done, which may be long before the first log."""
        super().on_step_end(args, state, control)
        is_first = self._state is not None and state.global_step == self._first_step + 1
        if is_first and not control.should_log:
            self._show(state, {})

    def _follow(self, activity: Activity) -> None:
        super()._follow(activity)
        state = self._state
        if state is None:
            return
        phase = DOING.get(activity.name, activity.name)
        is_new = state.global_step == self._first_step and phase not in self._announced_phases
        if is_new or time.monotonic() - self._printed > QUIET:
            self._announced_phases.add(phase)
            self._print([_step(state, 1), self._doing()])

    def _show(self, state: TrainerState, metrics: dict[str, str], title: str = "") -> None:
        """Add the time to lines of training: nothing else shows it."""
        if not title:
            metrics = metrics | {f"{self._elapsed()},": f"{self._left(state)} left"}
        super()._show(state, metrics, title)

    def _print(self, texts: Iterable[str]) -> None:
        self._printed = time.monotonic()
        super()._print(texts)


class RichProgressCallback(ProgressDisplay):
    """Prints logged values in a terminal, above one line that shows how far training is.

    That line is drawn anew for the width that the terminal has: step and remaining time first, then
    what training is doing, and a bar where there is room. `close` must be called before anything
    else is shown after an error; the trainers of this package do so. It needs rich.
    """

    def __init__(self) -> None:
        super().__init__()
        names = ("rich.live", "rich.text", "rich.console")
        self._live, self._text, console = (require(x, "RichProgressCallback") for x in names)
        self._console = console.Console()
        self._drawing: Any = None
        self._evaluation: tuple[int, int | None] | None = None  # batches done, and of how many

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Begin to draw on the main process."""
        super().on_train_begin(args, state, control)
        if self._state is not None:
            self._open()

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        eval_dataloader: Iterable[object] | None = None,
        **kwargs: object,
    ) -> None:
        """Count the batches of an evaluation."""
        if state.is_world_process_zero:
            total = len(eval_dataloader) if isinstance(eval_dataloader, Sized) else None
            self._evaluation = (self._evaluation or (0, None))[0] + 1, total
            self._open()

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        metrics: dict[str, float],
        **kwargs: object,
    ) -> None:
        """Print a line with the metrics of the evaluation."""
        self._evaluation = None
        if self._state is None:
            self.close()
        super().on_evaluate(args, state, control, metrics=metrics, **kwargs)

    def close(self) -> None:
        """Stop drawing, whatever is still going on."""
        self._follow(Activity(""))
        if self._drawing is not None:
            self._drawing.stop()  # draws the line once more
        self._drawing = self._evaluation = None
        super().close()

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> Iterator[Any]:
        yield self._text.Text(self._line(options.max_width), no_wrap=True, overflow="ellipsis")

    def _line(self, width: int) -> str:
        """Return the line for a terminal of this width: the most important texts that fit."""
        state = self._state
        texts: list[str] = []
        if self._evaluation is not None:
            done, total = self._evaluation
            texts = [f"evaluation {done}/{'?' if total is None else total}"]
        if state is not None:
            texts = [_step(state), *texts, f"ETA {self._left(state)}", self._doing()]
            texts = [text for text in (*texts, self._elapsed()) if text]
        while len(texts) > 1 and len("  ".join(texts)) > width:
            texts.pop()
        room = width - len("  ".join(texts)) - 2
        if state is not None and room >= NARROWEST_BAR:
            width = min(room, WIDEST_BAR)
            full = round(width * state.global_step / max(1, state.max_steps))
            texts.insert(1, "━" * full + "─" * (width - full))
        return "  ".join(texts)

    def _print(self, texts: Iterable[str]) -> None:
        self._console.print("  ".join(texts), markup=False, highlight=False)

    def _open(self) -> None:
        if self._drawing is None:
            self._drawing = self._live.Live(self, console=self._console, refresh_per_second=4)
            self._drawing.start()
            if logging.is_progress_bar_enabled():
                logging.disable_progress_bar()  # that of a checkpoint would be drawn into this one
                self._watching.callback(logging.enable_progress_bar)


def shown_metrics(metrics: Mapping[str, float], prefix: str = "") -> dict[str, str]:
    """Return the metrics in `SHOWN` that were logged, as text; see `format_metric`."""
    shown = {}
    for name, keys in SHOWN.items():
        logged = [prefix + key for key in keys if prefix + key in metrics]
        if logged:
            shown[name] = format_metric(metrics[logged[0]])
    return shown


def _step(state: TrainerState, later: int = 0) -> str:
    return f"step {state.global_step + later}/{state.max_steps}"


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
