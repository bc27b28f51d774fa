"""Charts of measured rows as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from tables import PHASES, Rows, of_a_step

COLORS = dict(zip(PHASES, ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#bab0ac")))  # noqa: B905


def _finish(figure: Any, path: Path) -> None:
    figure.tight_layout(rect=(0, 0.06 if figure.legends else 0, 1, 1))
    # No date and no version in the file, so that the same figures give the same bytes.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


SHAPES = ((3100, 53), (3100, 256), (512, 53), (512, 256))


# Colors of lines, enough for all measured settings.
LINES = (
    "#1f77b4",
    "#ff7f0e",
    "#2ca02c",
    "#d62728",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
    "#17becf",
    "#000000",
    "#1a55ff",
    "#b8860b",
    "#006400",
    "#800000",
    "#4b0082",
)
GAP = 0.048  # between two labels, of the height of a panel


def peak_against_count(
    rows: Rows,
    titles: dict[str, str],
    counts: Sequence[int],
    path: Path,
    shapes: Sequence[tuple[int, int]] = SHAPES,
) -> None:
    """Draw the peak against the number of completions, on logarithmic axes, a panel per shape."""
    _finish(peak_figure(rows, titles, counts, shapes), path)


def peak_figure(
    rows: Rows,
    titles: dict[str, str],
    counts: Sequence[int],
    shapes: Sequence[tuple[int, int]] = SHAPES,
) -> Any:
    """Draw a line in its own color for each setting, with the setting's name at its end."""
    colors = dict(zip(titles, LINES[: len(titles)], strict=True))
    width = min(2, len(shapes))
    height = -(-len(shapes) // width)
    size = 7.5 * width, 4.8 * height
    figure, axes = plt.subplots(height, width, figsize=size, squeeze=False)
    for axis, (prompt, completion) in zip(axes.flat, shapes, strict=False):
        axis.set(xscale="log", yscale="log", xlabel="completions of a prompt (k)", ylabel="MB")
        ends = {}
        for name, title in titles.items():
            shape = {"prompt": prompt, "completion": completion}
            points = [(k, rows.peak(name, completions=k, **shape)) for k in counts]
            points = [(k, peak / 1e6) for k, peak in points if peak is not None]
            if points:
                axis.plot(*zip(*points, strict=True), "o-", color=colors[name], markersize=4)
                ends[title] = (*points[-1], colors[name])
        axis.set_title(f"prompt {prompt:,}, completion {completion}")
        axis.set_xticks(counts, [str(k) for k in counts])
        axis.set_xlim(counts[0] * 0.9, counts[-1] * 1.1)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        _name_lines(axis, ends)
    for axis in axes.flat[len(shapes) :]:
        axis.remove()
    return figure


def _name_lines(axis: Any, ends: dict[str, tuple[float, float, str]]) -> None:
    """Write the names of lines beside a panel, ordered and connected to where the lines end."""
    low, high = np.log10(axis.get_ylim())
    positions = {title: (np.log10(y) - low) / (high - low) for title, (_, y, _) in ends.items()}
    upwards = sorted(positions, key=lambda title: positions[title])
    lowest = 0.0
    highest = 1.0
    for title in upwards:  # apart from each other,
        positions[title] = max(positions[title], lowest)
        lowest = positions[title] + GAP
    for title in reversed(upwards):  # and below the top
        positions[title] = min(positions[title], highest)
        highest = positions[title] - GAP
    for title, (x, y, color) in ends.items():
        axis.annotate(
            title,
            (x, y),
            (1.03, positions[title]),
            textcoords="axes fraction",
            color=color,
            fontsize=8,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 0.8,
                "linestyle": ":",
                "relpos": (0, 0.5),
            },
        )


def memory_over_time(rows: Rows, titles: dict[str, str], path: Path, **work: int) -> None:
    """Draw bytes held during two optimizer steps, colored by phase, with a panel per setting."""
    runs = {title: rows.run(name, **work) for name, title in titles.items()}
    shown = {title: run for title, run in runs.items() if run and run.get("timeline")}
    if not shown:
        return
    figure, axes = plt.subplots(len(shown), 1, figsize=(11, 2.2 * len(shown)), squeeze=False)
    for axis, (title, run) in zip(axes[:, 0], shown.items(), strict=True):
        _draw_timeline(axis, run["timeline"])
        axis.set_title(f"{title}: peak {run['peak'] / 1e6:,.0f} MB", fontsize=10)
        axis.set_ylabel("MB")
        axis.set_ylim(bottom=0)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[phase]) for phase in PHASES]
    axes[0, 0].legend(handles, PHASES, ncol=6, fontsize=7, loc="upper right")
    axes[-1, 0].set_xlabel("seconds")
    _finish(figure, path)


def _draw_timeline(axis: Any, timeline: list[list[Any]]) -> None:
    ends = [event[0] for event in timeline[1:]] + [timeline[-1][0]]
    for (start, held_bytes, phase), end in zip(timeline, ends, strict=True):
        axis.fill_between([start, end], held_bytes / 1e6, color=COLORS[phase], linewidth=0)


def stacked(rows: Rows, titles: dict[str, str], column: str, path: Path, **work: int) -> None:
    """Draw tokens or processor seconds of an optimizer step as bars stacked by phase."""
    runs = {title: rows.run(name, **work) for name, title in titles.items()}
    names = {"tokens": "tokens through the model", "cpu_seconds": "processor seconds"}
    values = {title: of_a_step(run, column) for title, run in runs.items() if run}
    bars(values, f"{names[column]}, one optimizer step", path)


def bars(values: dict[str, dict[str, float]], label: str, path: Path) -> None:
    """Draw a bar for each name, stacked by phase."""
    figure, axis = plt.subplots(figsize=(10, 1 + 0.45 * len(values)))
    for position, phases in enumerate(reversed(values.values())):
        left = 0.0
        for phase in PHASES:
            width = phases.get(phase, 0)
            axis.barh(position, width, left=left, color=COLORS[phase])
            left += width
    axis.set_yticks(range(len(values)), list(reversed(values)))
    axis.set_xlabel(label)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[phase]) for phase in PHASES]
    axis.legend(handles, PHASES, fontsize=7)
    _finish(figure, path)
