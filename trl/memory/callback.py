"""Memory by phase for any `transformers.Trainer`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from .meter import PhaseEvent, PhaseMeter, merge_peaks

if TYPE_CHECKING:
    from transformers import Trainer

    from .timeline import Timeline

_PASSES = ("forward", "backward", "optimizer")


class MemoryCallback(TrainerCallback):
    """Measures forward, backward and optimizer, and logs, writes and draws all phases of a meter.

    The largest figures since the last log are added to the logs, under the names of
    `PhaseMeter.take`; those of an evaluation begin with `eval_`. They are of the process that logs.
    Phases are written as JSON lines to `<output_dir>/memory.jsonl`, and drawn to
    `<output_dir>/memory.png` when training ends, if matplotlib is installed.

    Forward begins when the model is called in training mode with gradients on, and ends when the
    first gradient reaches one of its outputs. Then backward begins, which lasts until the next
    forward or the end of the micro-batch, clipping included. With `torch.compile`, several GPUs in
    one process, or a trainer that never calls the model as a whole, neither is seen. DeepSpeed
    steps its optimizer within backward.

    Trackers are called before callbacks that are given to a trainer, so they do not see the
    metrics, unless the callback goes first:

        MemoryCallback().attach(trainer)

    Args:
        meter (`PhaseMeter`, *optional*): to share with code that measures other phases. None: its
            own, on the trainer's device.
        passes (`bool`): whether to find forward and backward. False if the trainer's code marks
            them on `meter`.
        metrics (`bool`): whether to add to the logs. False if the trainer's code does.
        chart (`bool`): whether to draw.
    """

    def __init__(
        self,
        meter: PhaseMeter | None = None,
        passes: bool = True,
        metrics: bool = True,
        chart: bool = True,
    ):
        self.meter = meter
        self._finds_passes, self._logs, self._draws = passes, metrics, chart
        self._timeline: Timeline | None = None
        self._hooks: list[Any] = []
        self._in_step = False
        self._metrics: dict[str, dict[str, float]] = {}  # "" or "eval_" -> metrics not yet logged

    def attach(self, trainer: Trainer) -> MemoryCallback:
        """Add this to a trainer in front of its other callbacks, and return it."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    # --- Training begins and ends ---

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to listen."""
        self._detach()  # from a training that failed
        if self.meter is None:
            self.meter = PhaseMeter(args.device)
        self._in_step, self._metrics = False, {}
        path = Path(args.output_dir or ".") / "memory.jsonl"
        from .timeline import Timeline

        self._timeline = Timeline(path, state.is_world_process_zero, state.global_step)
        self.meter.on_phase_end.append(self._record)
        if self._finds_passes and args.n_gpu <= 1:
            model: nn.Module = kwargs["model"]
            self._hooks = [
                model.register_forward_pre_hook(self._before_forward),
                model.register_forward_hook(self._after_forward),
            ]

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop listening, and draw the chart."""
        timeline = self._timeline
        self._detach()
        if self._draws and timeline is not None and state.is_world_process_zero:
            from .timeline import draw

            draw(timeline.path, timeline.path.with_suffix(".png"))

    def _detach(self) -> None:
        self._stop(*_PASSES)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.meter is not None and self._record in self.meter.on_phase_end:
            self.meter.on_phase_end.remove(self._record)
        if self._timeline is not None:
            self._timeline.close()
            self._timeline = None

    # --- Phases ---

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step that begins."""
        self._in_step = True
        if self._timeline is not None:
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
        outputs = [x for x in _tensors(output) if x.requires_grad]
        for tensor in outputs:
            tensor.register_hook(self._gradient_arrives)
        if not outputs:
            self._stop("forward")

    def _gradient_arrives(self, gradient: Tensor) -> None:
        if self.meter is not None and self.meter.is_open("forward"):
            self.meter.stop("forward")
            self.meter.start("backward")

    def _start(self, phase: str) -> None:
        if self.meter is not None and not self.meter.is_open(phase):
            self.meter.start(phase)

    def _stop(self, *phases: str) -> None:
        for phase in phases:
            if self.meter is not None and self.meter.is_open(phase):
                self.meter.stop(phase)

    # --- Reports ---

    def _record(self, event: PhaseEvent) -> None:
        merge_peaks(self._metrics.setdefault("" if self._in_step else "eval_", {}), event)
        if self._timeline is not None:
            self._timeline.add(event)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell an evaluation that may follow from the step."""
        self._in_step = False

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
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


def _tensors(output: Any) -> list[Tensor]:
    """The tensors of a model's output: itself, or its items."""
    if isinstance(output, Mapping):
        output = list(output.values())
    items = output if isinstance(output, (list, tuple)) else [output]
    return [item for item in items if isinstance(item, Tensor)]
