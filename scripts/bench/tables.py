"""Markdown tables of measured rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Row = dict[str, Any]
PHASES = ("generation", "scoring", "forward", "backward", "optimizer", "other")


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table; all columns but the first are aligned to the right."""
    lines = [headers, ["---"] + ["---:"] * (len(headers) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def megabytes(value: float | None) -> str:
    """Format bytes as MB (1e6 bytes); a dash for None."""
    return "-" if value is None else f"{value / 1e6:,.0f}"


def times(value: float | None) -> str:
    """Format a ratio with two decimals; a dash for None."""
    return "-" if value is None else f"{value:.2f}"


def divided(a: float | None, b: float | None) -> float | None:
    """Return a / b; None if one of them is missing."""
    return None if a is None or b is None else a / b


def provenance(data: dict[str, Any]) -> str:
    """Describe the machines and the commits of the runs in a file.

    Runs without a machine of their own were made on that of the file.
    """
    runs = [run for row in data["rows"] for run in row["runs"] if "peak" in run]
    machines = Counter(_machine_line(run.get("machine", data.get("machine"))) for run in runs)
    commits = Counter(run.get("commit", "not recorded") for run in runs)
    text = "\n".join(f"Machine: {line} ({count} runs)." for line, count in machines.items())
    commit_rows = [[name, str(count)] for name, count in commits.items()]
    return f"{text}\n\n{markdown(['commit of this project', 'runs'], commit_rows)}"


def _machine_line(machine: dict[str, Any] | None) -> str:
    if machine is None:
        return "not recorded"
    size = f"{machine['cores']} cores, {machine['memory_gb']} GB"
    return f"{machine['cpu']}, {size}, {machine['system']}, Python {machine['python']}"


@dataclass(frozen=True)
class Rows:
    """Measured rows, found by setting and work.

    Args:
        all: as they stand in a results file.
    """

    all: list[Row]

    def find(self, setting: str, **work: Any) -> Row | None:
        """Return the row of a setting with exactly this work, except for trainer and options."""
        ignored = ("trainer", "options", "gpu_path", "steps", "vocabulary")
        for row in self.all:
            work_fields = {k: v for k, v in row["work"].items() if k not in ignored}
            if row["setting"] == setting and work_fields == work:
                return row
        return None

    def peaks(self, setting: str, **work: Any) -> list[int]:
        """Return all measured peaks of a row, in bytes."""
        row = self.find(setting, **normal(work))
        return [run["peak"] for run in row["runs"] if "peak" in run] if row else []

    def peak(self, setting: str, **work: Any) -> float | None:
        """Return the median of a row's peaks, in bytes."""
        peaks = self.peaks(setting, **work)
        return median(peaks) if peaks else None

    def run(self, setting: str, **work: Any) -> Row | None:
        """Return the first successful run of a row."""
        row = self.find(setting, **normal(work))
        return next((run for run in row["runs"] if "peak" in run), None) if row else None

    def cell(self, setting: str, **work: Any) -> str:
        """Format a peak in MB, or why there is none."""
        peak = self.peak(setting, **work)
        row = self.find(setting, **normal(work))
        if peak is not None or row is None:
            return megabytes(peak)
        last = row["runs"][-1]
        if "predicted" not in last:
            return "failed"
        gigabytes = last["predicted"][0]
        return f"(about {gigabytes * 1e3:,.0f})" if gigabytes else "-"

    def settings(self) -> set[str]:
        """Return the settings that have a successful run."""
        return {row["setting"] for row in self.all if any("peak" in run for run in row["runs"])}


def normal(work: dict[str, Any]) -> dict[str, Any]:
    """Return work as in results files: without default values."""
    defaults = {"prompt": 512, "completion": 53, "completions": 2}
    return {k: v for k, v in work.items() if defaults.get(k) != v}


def peak_table(rows: Rows, titles: dict[str, str], counts: Sequence[int], **shape: int) -> str:
    """Make a table of peaks in MB of one shape, with a row per setting and a column per count."""
    lines = [
        [title, *(rows.cell(name, completions=count, **shape) for count in counts)]
        for name, title in titles.items()
        if any(rows.peaks(name, completions=count, **shape) for count in counts)
    ]
    return markdown(["MB", *(f"k = {count}" for count in counts)], lines)


def growth_table(rows: Rows, titles: dict[str, str], **shape: int) -> str:
    """Make a table of how the peak grows with the number of completions."""
    lines = []
    for name, title in titles.items():
        peaks = {k: rows.peak(name, completions=k, **shape) for k in (2, 16, 64)}
        ratios = (divided(peaks[16], peaks[2]), divided(peaks[64], peaks[2]))
        lines.append([title, *map(times, ratios)])
    return markdown(["", "peak(k=16) / peak(k=2)", "peak(k=64) / peak(k=2)"], lines)


def reduction_table(
    rows: Rows, titles: dict[str, str], bases: dict[str, tuple[str, float]], **work: int
) -> str:
    """Make a table of how many times less memory than each base a setting takes.

    Args:
        rows: what was measured.
        titles: settings and their names.
        bases: for each column its setting and a factor that its peak is multiplied by.
        work: the shape.
    """
    lines = []
    for name, title in titles.items():
        own = rows.peak(name, **work)
        if own is None:
            continue
        ratios = [divided(_scaled(rows.peak(s, **work), f), own) for s, f in bases.values()]
        shown = ["-" if ratio is None else f"{ratio:,.1f}x" for ratio in ratios]
        lines.append([title, megabytes(own), *shown])
    return markdown(["", "MB", *bases], lines)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def phase_table(rows: Rows, titles: dict[str, str], column: str, **work: Any) -> str:
    """Make a table of peaks (`phase_peaks`), tokens or seconds of an optimizer step by phase."""
    show = {"phase_peaks": megabytes, "tokens": _count, "cpu_seconds": lambda v: f"{v:,.1f}"}[
        column
    ]
    phases = [p for p in PHASES if column != "tokens" or p in ("generation", "scoring", "forward")]
    lines = []
    for name, title in titles.items():
        run = rows.run(name, **work)
        if run is None:
            continue
        values = [of_a_step(run, column).get(phase, 0) for phase in phases]
        total = max(values) if column == "phase_peaks" else sum(values)
        lines.append([title, *map(show, values), show(total)])
    last = "peak" if column == "phase_peaks" else "total"
    return markdown(["", *phases, last], lines)


def phase_peak_table(
    rows: Rows, titles: dict[str, str], counts: Sequence[int], phase: str, **shape: int
) -> str:
    """Make a table of peaks in MB of a phase, with a row per setting and a column per count."""
    lines = []
    for name, title in titles.items():
        runs = [rows.run(name, completions=count, **shape) for count in counts]
        if any(runs):
            shown = [megabytes(run and run["phase_peaks"].get(phase)) for run in runs]
            lines.append([title, *shown])
    return markdown(["MB", *(f"k = {count}" for count in counts)], lines)


def of_a_step(run: Row, column: str) -> dict[str, float]:
    """Return peaks of all steps, or counts of the last step. The first step also warms up."""
    return run[column] if column == "phase_peaks" else run["steps"][-1][column]


def _count(value: float) -> str:
    return f"{value:,.0f}"


def ratio_with_spread(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Format the median and the range of theirs / ours, pair by pair."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=False)]
    return median(ratios), min(ratios), max(ratios)
