"""Log, write and chart memory by phase for any `transformers.Trainer`."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from ..imports import is_available, require
from ..json_files import JsonLinesFile
from ..ops.torch_internals import tree_leaves
from .meter import PHASES, PhaseEvent, PhaseMeter, merge_peaks

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.get_logger(__name__)

_MOST_SPANS = 1000  # spans of one phase in a chart


class Timeline:
    """Appends a JSON line for each phase as soon as it ends, so a killed run loses none.

    A line has `step`, `phase`, `start` and `end` (seconds since the run began) and the figures of
    `PhaseEvent.readable`. When a run resumes at `step`, lines of later steps are dropped first, and
    time continues where the remaining lines end. Only the main process `writes`.
    """

    def __init__(self, path: Path, writes: bool = True, step: int = 0):
        self.path = path
        self.step = step
        self._lines = JsonLinesFile(path) if writes else None
        self._shift: float | None = None  # from the meter's clock to that of the lines
        if self._lines is not None:
            self._lines.drop_after(step)

    def add(self, event: PhaseEvent) -> None:
        """Write one phase."""
        if self._lines is None:
            return
        if self._shift is None:
            ends = (line["end"] for line in self._lines.read())
            self._shift = max(ends, default=0.0) - event.start
        line = {
            "step": self.step,
            "phase": event.phase,
            "start": round(event.start + self._shift, 6),
            "end": round(event.end + self._shift, 6),
        }
        self._lines.add([line | event.readable()])


class MemoryCallback(TrainerCallback):
    """Measures forward, backward and optimizer; logs, writes and charts all phases of a meter.

    With `metrics`, the largest figures since the last log are added to the logs, under the names of
    `PhaseMeter.take`; those of an evaluation begin with `eval_`. They are of the process that logs.
    Phases are written as JSON lines to `<output_dir>/memory.jsonl`. At the end they are drawn to
    `memory.png` beside it, by default if matplotlib is installed; with `chart=True` a warning says
    if it is not. Pass a `meter` to share it with code that measures other phases, and
    `passes=False` if that code also measures forward and backward.

    Forward begins when the model is called in training mode with gradients enabled, and ends when
    the first gradient reaches one of its outputs. Then backward begins. It lasts until the next
    forward or the end of the micro-batch, gradient clipping included. Neither is measured with
    `torch.compile`, with several GPUs in one process, or in a trainer that never calls the whole
    model. DeepSpeed steps its optimizer within backward.

    Experiment trackers run before the callbacks passed to a trainer, so they do not see the
    metrics unless this callback is put first:

        MemoryCallback().attach(trainer)
    """

    _timeline: Timeline  # of the training that has begun

    def __init__(
        self,
        meter: PhaseMeter | None = None,
        passes: bool = True,
        metrics: bool = True,
        chart: bool | None = None,
    ):
        self.meter = meter
        self._measures_passes = passes
        self._logs = metrics
        self._chart = chart
        self._listening = ExitStack()
        self._running: dict[str, ExitStack] = {}  # phases that this callback measures
        self._in_step = False
        self._metrics: dict[str, dict[str, float]] = {}  # "" or "eval_" -> metrics not yet logged

    def attach(self, trainer: "Trainer") -> Self:
        """Add this callback in front of the trainer's other callbacks, and return it."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Register hooks and open the file."""
        self._detach()  # from an earlier training that failed
        if self.meter is None:
            self.meter = PhaseMeter(args.device)
        self._in_step = False
        self._metrics = {}
        path = Path(args.output_dir or ".") / "memory.jsonl"
        self._timeline = Timeline(path, state.is_world_process_zero, state.global_step)
        self.meter.on_phase_end.append(self._record)
        self._listening.callback(self.meter.on_phase_end.remove, self._record)
        if self._measures_passes and args.n_gpu <= 1:
            model: nn.Module = kwargs["model"]
            before = model.register_forward_pre_hook(self._before_forward)
            after = model.register_forward_hook(self._after_forward)
            self._listening.enter_context(before)
            self._listening.enter_context(after)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Remove hooks and draw the chart."""
        self._detach()
        draws = is_available("matplotlib") if self._chart is None else self._chart
        if draws and state.is_world_process_zero:
            draw(self._timeline.path, self._timeline.path.with_suffix(".png"))

    def _detach(self) -> None:
        self._stop("forward", "backward", "optimizer")
        self._listening.close()

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Note the number of the step that begins."""
        self.begin_step(state.global_step)

    def begin_step(self, steps_done: int) -> None:
        """Count what follows to the step after these many.

        A trainer that works before `on_step_begin`, where it takes the batches of a step, calls it.
        """
        self._in_step = True
        self._timeline.step = steps_done + 1

    def on_substep_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """End forward and backward of a micro-batch that is not the last."""
        self._stop("forward", "backward")

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """End forward and backward of the last micro-batch; begin the optimizer."""
        self._stop("forward", "backward")
        self._start("optimizer")

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """End the optimizer."""
        self._stop("optimizer")

    def _before_forward(self, module: nn.Module, args: object) -> None:
        if _trains(module):
            self._stop("backward")
            self._start("forward")

    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        if not _trains(module):
            return
        outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        for tensor in outputs:
            tensor.register_hook(self._gradient_arrives)
        if not outputs:
            self._stop("forward")

    def _gradient_arrives(self, gradient: Tensor) -> None:
        if "forward" in self._running:
            self._stop("forward")
            self._start("backward")

    def _start(self, phase: str) -> None:
        if self.meter is not None and phase not in self._running:
            self._running[phase] = ExitStack()
            self._running[phase].enter_context(self.meter.phase(phase))

    def _stop(self, *phases: str) -> None:
        for phase in filter(self._running.__contains__, phases):
            self._running.pop(phase).close()

    def _record(self, event: PhaseEvent) -> None:
        merge_peaks(self._metrics.setdefault("" if self._in_step else "eval_", {}), event)
        self._timeline.add(event)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Note that what follows, such as an evaluation, is not part of a step."""
        self._in_step = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Add the metrics to the logs and to the trainer's history."""
        if logs is None or not self._logs:
            return
        prefix = "eval_" if any(name.startswith("eval_") for name in logs) else ""
        metrics = {prefix + name: x for name, x in self._metrics.pop(prefix, {}).items()}
        logs.update(metrics)
        if state.log_history:
            state.log_history[-1].update(metrics)


def _trains(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def draw(jsonl: Path, png: Path) -> bool:
    """Draw the peak of each phase over time; return False if there is nothing to draw.

    Also False, with a warning, if matplotlib is missing.
    """
    try:
        library = require("matplotlib.figure", "The chart of memory over time")
    except ImportError as error:
        logger.warning_once(str(error))
        return False
    spans_of = spans(JsonLinesFile(jsonl).read())
    if not spans_of:
        return False
    # Peaks of phases often differ by less than a percent, so each phase has its own panel.
    phases = [phase for phase in PHASES if phase in spans_of]
    figure = library.Figure((10, 1 + 1.1 * len(phases)), layout="constrained")
    panels = figure.subplots(len(phases), sharex=True, sharey=True, squeeze=False)[:, 0]
    highest = max(peak for phase_spans in spans_of.values() for _, _, peak in phase_spans)
    for phase, axes in zip(phases, panels, strict=True):
        starts, ends, peaks = zip(*spans_of[phase], strict=True)
        color = f"C{PHASES.index(phase)}"
        axes.hlines(peaks, starts, ends, color=color, linewidth=4)
        axes.plot(ends, peaks, color=color, linewidth=0.8, marker=".", markersize=4)
        axes.fill_between(ends, peaks, color=color, alpha=0.2, linewidth=0)
        title = f"{phase}: at most {max(peaks):.3g} GB"
        axes.set_title(title, loc="left", fontsize=10, color=color, pad=3)
        axes.set(ylabel="GB", ylim=(0, 1.1 * highest))
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("seconds")
    figure.suptitle("Peak memory by phase")
    figure.savefig(png, dpi=120)
    return True


def spans(records: Iterator[dict[str, Any]]) -> dict[str, list[tuple[float, float, float]]]:
    """Collect (start, end, peak) of each phase, in seconds and GB; merge neighbors if too many."""
    spans_of: dict[str, list[tuple[float, float, float]]] = {}
    for record in records:
        if "peak_gb" in record:
            span = record["start"], record["end"], record["peak_gb"]
            spans_of.setdefault(record["phase"], []).append(span)
    return {phase: _merged(phase_spans) for phase, phase_spans in spans_of.items()}


def _merged(spans: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """Merge neighboring spans until at most `_MOST_SPANS` are left."""
    size = -(-len(spans) // _MOST_SPANS)
    merged = []
    for first in range(0, len(spans), size):
        neighbors = spans[first : first + size]
        peak = max(span_peak for _, _, span_peak in neighbors)
        merged.append((neighbors[0][0], neighbors[-1][1], peak))
    return merged
