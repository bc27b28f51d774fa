"""Peak memory of each phase of a training step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..text import did_you_mean
from .probes import HeapProbe, Probe, ProcessProbe, cuda_figures

PHASES = ("generation", "scoring", "rewards", "forward", "backward", "optimizer")
GB = 1e9
_AT_THE_END = ("fragmentation", "tensors")  # the other figures are peaks


@dataclass(frozen=True)
class PhaseEvent:
    """One phase that has ended."""

    phase: str  # one of `PHASES`
    start: float  # seconds since the meter was made, phases inside it included
    end: float
    figures: dict[str, float]  # bytes by name, without the phases inside it; see `PhaseMeter`

    def readable(self) -> dict[str, float]:
        """Return the figures in GB (10^9 bytes) as `peak_gb` and so on, and `fragmentation`."""
        share = "fragmentation"
        found = {f"{name}_gb": x / GB for name, x in self.figures.items() if name != share}
        return found | {name: x for name, x in self.figures.items() if name == share}


class PhaseMeter:
    """Measures the memory of phases, cheaply: under a tenth of a millisecond at each end.

    Use `with meter.phase("scoring"): ...`, or `start` and `stop` for a phase that begins in one
    function and ends in another. Phases may be nested. The inner one wins: what happens within it
    is not counted for the outer one, which goes on after it.

    Figures on a CUDA device are `cuda_figures`; elsewhere those of `ProcessProbe` and `HeapProbe`,
    for which `tensors` may stand, on any device. The peaks that the device or the kernel keep are
    reset at each end of a phase. Neither random numbers nor results change.

    Functions in `on_phase_end` are called with the `PhaseEvent` of each phase that ends; `peak` is
    the largest one in bytes, in a phase or between phases.
    """

    def __init__(
        self, device: torch.device | str, enabled: bool = True, tensors: Probe | None = None
    ):
        self.enabled = enabled
        self.on_phase_end: list[Callable[[PhaseEvent], None]] = []
        self.peak = 0.0
        self._probes = _probes(torch.device(device), tensors) if enabled else []
        self._open: list[PhaseEvent] = []  # the innermost one last; none has its end yet
        self._metrics: dict[str, float] = {}
        self._born = time.perf_counter()
        for probe in self._probes[:1]:  # of peaks; tensors are looked for when a phase begins
            probe()

    @property
    def current(self) -> str | None:
        """The innermost open phase."""
        return self._open[-1].phase if self._open else None

    def is_open(self, phase: str) -> bool:
        """Whether `phase` has been started and not stopped."""
        return any(event.phase == phase for event in self._open)

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Measure a block; phases left open in it, by an exception say, end with it."""
        depth = len(self._open)
        self.start(phase)
        try:
            yield
        finally:
            self._unwind(depth)

    def start(self, phase: str) -> None:
        """Begin one of `PHASES`, within the phase that is open, if any."""
        if phase not in PHASES:
            hint = did_you_mean(phase, PHASES, f" It must be one of {', '.join(PHASES)}.")
            raise ValueError(f"phase={phase!r} is unknown.{hint}")
        if self.enabled:
            self._boundary()
            self._open.append(PhaseEvent(phase, time.perf_counter() - self._born, 0.0, {}))

    def stop(self, phase: str) -> None:
        """End the latest open phase of this name, and the phases left open within it."""
        if not self.enabled:
            return
        names = [event.phase for event in self._open]
        if phase not in names:
            opened = ", ".join(names) or "none"
            raise ValueError(f"phase={phase!r} cannot be stopped; open: {opened}.")
        self._unwind(len(names) - 1 - names[::-1].index(phase))

    def take(self) -> dict[str, float]:
        """Return the largest figure of each phase that ended since the last call.

        They are `memory/<phase>/peak_gb`, `.../reserved_gb`, `.../tensors_gb` in GB (10^9 bytes)
        and `memory/<phase>/fragmentation`, as far as the device has them.
        """
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _unwind(self, depth: int) -> None:
        while len(self._open) > depth:
            self._boundary()
            event = replace(self._open.pop(), end=time.perf_counter() - self._born)
            merge_peaks(self._metrics, event)
            for listener in self.on_phase_end:
                listener(event)

    def _boundary(self) -> None:
        """Give the stretch that ends here to the innermost phase."""
        figures: dict[str, float] = {}
        for probe in self._probes:
            figures |= probe()
        self.peak = max(self.peak, figures.get("peak", 0.0))
        held = self._open[-1].figures if self._open else {}
        for name, value in figures.items():
            held[name] = value if name in _AT_THE_END else max(held.get(name, value), value)


def merge_peaks(metrics: dict[str, float], event: PhaseEvent) -> None:
    """Raise `metrics`, named as by `take`, to the figures of `event` where those are larger."""
    for name, value in event.readable().items():
        key = f"memory/{event.phase}/{name}"
        metrics[key] = max(metrics.get(key, value), value)


def _probes(device: torch.device, tensors: Probe | None) -> list[Probe]:
    if device.type == "cuda":
        return [partial(cuda_figures, device), *filter(None, [tensors])]
    return [ProcessProbe(), tensors or HeapProbe()]
