"""The memory of a run over time: one JSON line for each phase, and a chart of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from transformers.utils import logging

from ..imports import require
from ..step_lines import StepLines
from .meter import PHASES, PhaseEvent

logger = logging.get_logger(__name__)

_MOST_SPANS = 1000  # of one phase in a chart


class Timeline:
    """Appends a JSON line for each phase that ends, at once, so a killed run leaves all of them.

    A line has `step`, `phase`, `start` and `end` (seconds since the run began) and the figures of
    `PhaseEvent.readable`. Lines of steps after `step` are dropped first, as a run that went further
    wrote them; after the others, time goes on where it stopped.

    Args:
        path: the file, `memory.jsonl` in the output folder.
        writes (`bool`): whether this process writes; True on the main process alone.
        step (`int`): optimizer steps already made; 0 begins a new file.

    Attributes:
        step (`int`): written with the next lines.
    """

    def __init__(self, path: str | Path, writes: bool = True, step: int = 0):
        self.path = Path(path)
        self.step = step
        self._writes = writes
        self._seconds = self._cut() if writes else 0.0
        self._begun: float | None = None  # of the meter's clock
        self._file: TextIO | None = None

    def _cut(self) -> float:
        """Drop the lines of later steps; return when the last of the others ended."""
        lines = StepLines(self.path)
        lines.keep_until(self.step)
        return max((record["end"] for record in lines.read()), default=0.0)

    def add(self, event: PhaseEvent) -> None:
        """Write one phase."""
        if not self._writes:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        if self._begun is None:
            self._begun = event.start
        shift = self._seconds - self._begun
        times = {"start": round(event.start + shift, 6), "end": round(event.end + shift, 6)}
        line = {"step": self.step, "phase": event.phase} | times | event.readable()
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; a later `add` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def draw(jsonl: str | Path, png: str | Path) -> bool:
    """Draw the peak of each phase over time, one panel below the other, of what `Timeline` wrote.

    False: nothing was drawn, because matplotlib is not installed (a log line tells how to install
    it) or no phase has a peak.
    """
    try:
        library = require("matplotlib.figure", "The chart of memory over time")
    except ImportError as error:
        logger.warning_once(str(error))
        return False
    if not (found := spans(StepLines(Path(jsonl)).read())):
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
    """Collect start, end (seconds) and peak (GB) of each phase.

    Phases that ran very often have neighbors joined: first start, last end, largest peak.
    """
    found: dict[str, list[tuple[float, float, float]]] = {}
    for record in records:
        if "peak_gb" in record:
            span = (record["start"], record["end"], record["peak_gb"])
            found.setdefault(record["phase"], []).append(span)
    for phase, items in found.items():
        size = -(-len(items) // _MOST_SPANS)
        pieces = [items[i : i + size] for i in range(0, len(items), size)]
        found[phase] = [(p[0][0], p[-1][1], max(item[2] for item in p)) for p in pieces]
    return found
