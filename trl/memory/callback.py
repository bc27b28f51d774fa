"""Memory by phase for any `transformers.Trainer`: logged, written over time, and drawn."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.utils import logging

from ..imports import is_available, require
from ..json_files import JsonLinesFile
from ..torch_internals import tree_leaves
from .meter import PHASES, PhaseEvent, PhaseMeter, merge_peaks

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.get_logger(__name__)

_MOST_SPANS = 1000  # of one phase in a chart


class Timeline:
    """Appends a JSON line for each phase that ends, at once, so a killed run leaves all of them.

    A line has `step`, `phase`, `start` and `end` (seconds since the run began) and the figures of
    `PhaseEvent.readable`. Lines of steps after `step` are dropped first, as a run that went further
    wrote them; after the others, time goes on where it stopped. The main process alone `writes`.
    """

    def __init__(self, path: Path, writes: bool = True, step: int = 0):
        self.path, self.step = path, step
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
        start, end = (round(time + self._shift, 6) for time in (event.start, event.end))
        line = {"step": self.step, "phase": event.phase, "start": start, "end": end}
        self._lines.add([line | event.readable()])


class MemoryCallback(TrainerCallback):
    """Measures forward, backward and optimizer, and logs, writes and draws all phases of a meter.

    With `metrics`, the largest figures since the last log are added to the logs, under the names of
    `PhaseMeter.take`; those of an evaluation begin with `eval_`. They are of the process that logs.
    Phases are written as JSON lines to `<output_dir>/memory.jsonl`, and drawn to `memory.png`
    beside it at the end, by default if matplotlib is installed; with `chart=True` the log says if
    it is not. A `meter` may be shared with code that measures other phases, and with `passes=False`
    forward and backward.

    Forward begins when the model is called in training mode with gradients on, and ends when the
    first gradient reaches one of its outputs. Then backward begins, which lasts until the next
    forward or the end of the micro-batch, clipping included. With `torch.compile`, several GPUs in
    one process, or a trainer that never calls the model as a whole, neither is seen. DeepSpeed
    steps its optimizer within backward.

    Experiment trackers are called before the callbacks passed to a trainer, so they do not see
    the metrics, unless this callback goes first:

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
        self._finds_passes, self._logs, self._draws = passes, metrics, chart
        self._listening = ExitStack()
        self._running: dict[str, ExitStack] = {}  # phases that this measures
        self._in_step = False
        self._metrics: dict[str, dict[str, float]] = {}  # "" or "eval_" -> metrics not yet logged

    def attach(self, trainer: "Trainer") -> Self:
        """Add this to a trainer in front of its other callbacks, and return it."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to listen."""
        self._detach()  # from a training that failed
        if self.meter is None:
            self.meter = PhaseMeter(args.device)
        self._in_step, self._metrics = False, {}
        path = Path(args.output_dir or ".") / "memory.jsonl"
        self._timeline = Timeline(path, state.is_world_process_zero, state.global_step)
        self.meter.on_phase_end.append(self._record)
        self._listening.callback(self.meter.on_phase_end.remove, self._record)
        if self._finds_passes and args.n_gpu <= 1:
            model, enter = kwargs["model"], self._listening.enter_context
            enter(model.register_forward_pre_hook(self._before_forward))
            enter(model.register_forward_hook(self._after_forward))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop listening, and draw the chart."""
        self._detach()
        draws = is_available("matplotlib") if self._draws is None else self._draws
        if draws and state.is_world_process_zero:
            draw(self._timeline.path, self._timeline.path.with_suffix(".png"))

    def _detach(self) -> None:
        self._stop("forward", "backward", "optimizer")
        self._listening.close()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step that begins."""
        self._in_step = True
        self._timeline.step = state.global_step + 1

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the passes of a micro-batch that is not the last."""
        self._stop("forward", "backward")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the passes of the last micro-batch; begin the optimizer."""
        self._stop("forward", "backward")
        self._start("optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the optimizer."""
        self._stop("optimizer")

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if _trains(module):
            self._stop("backward")
            self._start("forward")

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
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

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell an evaluation that may follow from the step."""
        self._in_step = False

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the metrics to the logs and to the trainer's history."""
        logs: dict[str, Any] | None = kwargs.get("logs")
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
    """Draw the peak of each phase over time; False if there is none, or no matplotlib (logged)."""
    try:
        library = require("matplotlib.figure", "The chart of memory over time")
    except ImportError as error:
        logger.warning_once(str(error))
        return False
    if not (found := spans(JsonLinesFile(jsonl).read())):
        return False
    # Peaks of phases are often the same within a percent, so each has a panel of its own.
    shown = [phase for phase in PHASES if phase in found]
    figure = library.Figure((10, 1 + 1.1 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), sharex=True, sharey=True, squeeze=False)[:, 0]
    highest = max(peak for spans in found.values() for _, _, peak in spans)
    for phase, axes in zip(shown, panels, strict=True):
        starts, ends, peaks = zip(*found[phase], strict=True)
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
    """Collect start, end (seconds) and peak (GB) of each phase; join neighbors where many."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for record in records:
        if "peak_gb" in record:
            span = record["start"], record["end"], record["peak_gb"]
            found.setdefault(record["phase"], []).append(span)
    for phase, items in found.items():
        size = -(-len(items) // _MOST_SPANS)
        pieces = [items[i : i + size] for i in range(0, len(items), size)]
        found[phase] = [(p[0][0], p[-1][1], max(item[2] for item in p)) for p in pieces]
    return found
