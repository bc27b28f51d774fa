"""Markdown tables of measured rows; nothing here measures or draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Row = dict[str, Any]
PHASES = ("generation", "scoring", "forward", "backward", "optimizer", "other")


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; all columns but the first are aligned to the right."""
    lines = [headers, ["---"] + ["---:"] * (len(headers) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def megabytes(value: float | None) -> str:
    """Bytes as MB (1e6 bytes), or a dash."""
    return "-" if value is None else f"{value / 1e6:,.0f}"


def times(value: float | None) -> str:
    """A ratio with two digits, or a dash."""
    return "-" if value is None else f"{value:.2f}"


def divided(a: float | None, b: float | None) -> float | None:
    """a / b, or None where one is missing."""
    return None if a is None or b is None else a / b


def provenance(data: dict[str, Any]) -> str:
    """The machines and the commits of this project with which the runs of a file were made.

    Runs without a machine of their own were made on that of the file.
    """
    runs = [run for row in data["rows"] for run in row["runs"] if "peak" in run]
    machines = Counter(_machine_line(run.get("machine", data.get("machine"))) for run in runs)
    commits = Counter(run.get("commit", "not recorded") for run in runs)
    text = "\n".join(f"Machine: {line} ({count} runs)." for line, count in machines.items())
    found = [[name, str(count)] for name, count in commits.items()]
    return f"{text}\n\n{markdown(['commit of this project', 'runs'], found)}"


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
        """The row of a setting whose work, beside trainer and options, is exactly this."""
        ignored = ("trainer", "options", "gpu_path", "steps", "vocabulary")
        for row in self.all:
            given = {k: v for k, v in row["work"].items() if k not in ignored}
            if row["setting"] == setting and given == work:
                return row
        return None

    def peaks(self, setting: str, **work: Any) -> list[int]:
        """All measured peaks of a row in bytes."""
        row = self.find(setting, **normal(work))
        return [run["peak"] for run in row["runs"] if "peak" in run] if row else []

    def peak(self, setting: str, **work: Any) -> float | None:
        """The middle of a row's peaks in bytes."""
        found = self.peaks(setting, **work)
        return median(found) if found else None

    def run(self, setting: str, **work: Any) -> Row | None:
        """The first successful run of a row."""
        row = self.find(setting, **normal(work))
        return next((run for run in row["runs"] if "peak" in run), None) if row else None

    def cell(self, setting: str, **work: Any) -> str:
        """A peak in MB, or what is known in its place."""
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
        """The names of all settings that have a successful run."""
        return {row["setting"] for row in self.all if any("peak" in run for run in row["runs"])}


def normal(work: dict[str, Any]) -> dict[str, Any]:
    """A work as results files name it: without what is the default."""
    defaults = {"prompt": 512, "completion": 53, "completions": 2}
    return {k: v for k, v in work.items() if defaults.get(k) != v}


def peak_table(rows: Rows, titles: dict[str, str], counts: Sequence[int], **shape: int) -> str:
    """Peaks in MB of one shape: a line for each setting, a column for each count."""
    lines = [
        [title, *(rows.cell(name, completions=count, **shape) for count in counts)]
        for name, title in titles.items()
        if any(rows.peaks(name, completions=count, **shape) for count in counts)
    ]
    return markdown(["MB", *(f"k = {count}" for count in counts)], lines)


def growth_table(rows: Rows, titles: dict[str, str], **shape: int) -> str:
    """How the peak grows with the number of completions."""
    lines = []
    for name, title in titles.items():
        peaks = {k: rows.peak(name, completions=k, **shape) for k in (2, 16, 64)}
        ratios = (divided(peaks[16], peaks[2]), divided(peaks[64], peaks[2]))
        lines.append([title, *map(times, ratios)])
    return markdown(["", "peak(k=16) / peak(k=2)", "peak(k=64) / peak(k=2)"], lines)


def reduction_table(
    rows: Rows, titles: dict[str, str], bases: dict[str, tuple[str, float]], **work: int
) -> str:
    """How many times less than each base a setting holds.

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


def phase_table(rows: Rows, titles: dict[str, str], what: str, **work: Any) -> str:
    """Peaks (`phase_peaks`), tokens or seconds of one optimizer step by phase."""
    show = {"phase_peaks": megabytes, "tokens": _count, "cpu_seconds": lambda v: f"{v:,.1f}"}[what]
    phases = [p for p in PHASES if what != "tokens" or p in ("generation", "scoring", "forward")]
    lines = []
    for name, title in titles.items():
        run = rows.run(name, **work)
        if run is None:
            continue
        values = [of_a_step(run, what).get(phase, 0) for phase in phases]
        total = max(values) if what == "phase_peaks" else sum(values)
        lines.append([title, *map(show, values), show(total)])
    last = "peak" if what == "phase_peaks" else "total"
    return markdown(["", *phases, last], lines)


def phase_peak_table(
    rows: Rows, titles: dict[str, str], counts: Sequence[int], phase: str, **shape: int
) -> str:
    """Peaks in MB of one phase: a line for each setting, a column for each count."""
    lines = []
    for name, title in titles.items():
        runs = [rows.run(name, completions=count, **shape) for count in counts]
        if any(runs):
            shown = [megabytes(run and run["phase_peaks"].get(phase)) for run in runs]
            lines.append([title, *shown])
    return markdown(["MB", *(f"k = {count}" for count in counts)], lines)


def of_a_step(run: Row, what: str) -> dict[str, float]:
    """Peaks of all steps, or what the last step counted: the first one also warms up."""
    return run[what] if what == "phase_peaks" else run["steps"][-1][what]


def _count(value: float) -> str:
    return f"{value:,.0f}"


def ratio_with_spread(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Middle, lowest and highest of theirs / ours, taken pair by pair."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=False)]
    return median(ratios), min(ratios), max(ratios)
