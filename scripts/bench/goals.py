"""Compares what was measured with the goals of the project: docs/benchmarks/goals.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from memory import COUNTS, HEADLINE, SCALE, SETTINGS, SHAPES, method_sizes, size_words
from runs import Work
from step import PEER, phase_seconds
from step import SHAPES as STEP_SHAPES
from step_report import pairs
from tables import Rows, divided, markdown

OURS = "default"
OUR_BEST = ("lean", "all", "default")  # settings of which the one that holds least counts
PEER_PATHS = {"now": "on a CPU", "now-gpu": "its GPU path"}  # of the current peer
MICRO_BATCHES: tuple[dict[str, int], ...] = ({}, {"micro_batch": 1})  # the whole group, one row
CELL = {"prompt": HEADLINE[0], "completion": HEADLINE[1], "completions": 8}
LONG_PROMPT = 3100
LARGE_GROUP = 8


@dataclass(frozen=True)
class Goal:
    """A measured figure and its bound.

    Args:
        what: the figure in words.
        bound: what it should be at most or at least.
        value: what was measured; None: it was not.
        at_least: whether the bound is a lower one.
    """

    what: str
    bound: float
    value: float | None
    at_least: bool = False

    def line(self) -> list[str]:
        """Make a row of the table."""
        if self.value is None:
            return [self.what, self._bound(), "-", "not measured"]
        met = self.value >= self.bound if self.at_least else self.value <= self.bound
        return [self.what, self._bound(), f"{self.value:,.3g}", "met" if met else "missed"]

    def _bound(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.bound:,.3g}"


def growth(rows: Rows) -> Iterator[Goal]:
    """Goals for the growth of the peak with the number of completions."""
    shape = {"prompt": HEADLINE[0], "completion": HEADLINE[1]}
    peaks = {k: rows.peak(OURS, completions=k, **shape) for k in COUNTS}
    for count, bound in ((16, 1.10), (64, 1.15)):
        value = divided(peaks[count], peaks[2])
        yield Goal(f"peak(k={count}) / peak(k=2), 3,100/53", bound, value)


def sizes(rows: Rows) -> Iterator[Goal]:
    """Goals for the peak of the headline cell, absolute and relative to the peers."""
    own = rows.peak(OURS, **CELL)
    yield Goal("peak at 3,100/53/8, MB", 100, divided(own, 1e6))
    peer = rows.peak("now-gpu", **CELL)
    yield Goal("the same, over the GPU path of trl 1.16.0", 1 / 4, divided(own, peer))
    smallest = least(rows, OUR_BEST, **CELL), least(rows, ("now-gpu",), **CELL)
    yield Goal("the same, best settings of each", 1 / 4, divided(*smallest))
    old = rows.peak("old", **CELL)
    estimate = None if old is None else SCALE * old
    yield Goal("the same, over trl 0.20.0 (estimate)", 1 / 500, divided(own, estimate))


def methods(rows: Rows) -> Iterator[Goal]:
    """Goals for the peaks of Online DPO and PPO, relative to the peers that have them."""
    for method, peers, sizes in method_sizes():
        for peer in peers:
            peaks = [rows.peak(name, algorithm=method, **sizes) for name in (OURS, peer)]
            name = f"{method}: peak at {size_words(sizes)} over {SETTINGS[peer].title}"
            yield Goal(name, 1 / 4, divided(*peaks))


def least(rows: Rows, names: Iterable[str], **cell: int) -> float | None:
    """Return the lowest peak of some settings over the measured micro-batch sizes."""
    peaks = [rows.peak(name, **cell, **size) for name in names for size in MICRO_BATCHES]
    return min((peak for peak in peaks if peak is not None), default=None)


def against_peer(rows: Rows, path: str, name: str) -> Iterator[Goal]:
    """Goal for the worst ratio to a peer over all common cells, with the best setting of each."""
    ratios = {
        (prompt, completion, count): divided(
            least(rows, OUR_BEST, **cell), least(rows, (path,), **cell)
        )
        for prompt, completion in SHAPES
        for count in COUNTS
        for cell in [{"prompt": prompt, "completion": completion, "completions": count}]
    }
    measured = {cell: ratio for cell, ratio in ratios.items() if ratio is not None}
    worst = max(measured, key=lambda cell: measured[cell], default=None)
    where = "" if worst is None else f" ({worst[0]:,}/{worst[1]}/{worst[2]})"
    yield Goal(
        f"peak over trl 1.16.0, {name}, best settings of each: worst of {len(measured)} cells"
        f"{where}",
        1.0,
        max(measured.values(), default=None),
    )
    large = [r for (p, _, k), r in measured.items() if p == LONG_PROMPT and k >= LARGE_GROUP]
    yield Goal(
        f"the same, prompts of 3,100 tokens and k >= 8: worst of {len(large)}",
        1 / 3,
        max(large, default=None),
    )


def tokens(rows: Rows, steps: list[Any]) -> Iterator[Goal]:
    """Goals for the tokens that an update computes, relative to the current peer."""
    counted = [_tokens(rows.run(name, **CELL)) for name in (OURS, "now-gpu")]
    yield Goal("tokens of an update at 3,100/53/8, over trl 1.16.0", 1 / 8, divided(*counted))
    for work, ours, theirs in steps:
        if work.algorithm == "RLOO" and STEP_SHAPES.index(full_shape(work)) == 0:
            training = ("scoring", "forward")
            ratio = divided(_tokens(ours[0], training), _tokens(theirs[0], training))
            yield Goal(f"tokens of scoring and training at {named(work)}", 1 / 4, ratio)


def _tokens(run: Any, phases: tuple[str, ...] = ()) -> float | None:
    if run is None:
        return None
    counted = run["steps"][-1]["tokens"]
    return float(sum(count for name, count in counted.items() if not phases or name in phases))


def speed(steps: list[Any]) -> Iterator[Goal]:
    """Goals for the time of scoring and training, relative to the current peer."""
    bounds = dict(zip(STEP_SHAPES, (3.0, 1.5, 1.0), strict=True))
    for work, ours, theirs in steps:
        ratios = [
            phase_seconds(b)["training"] / phase_seconds(a)["training"]
            for a, b in zip(ours, theirs, strict=False)
        ]
        title = f"{work.algorithm}, scoring + training at {named(work)}: times as fast"
        yield Goal(title, bounds[full_shape(work)], median(ratios), at_least=True)


def full_shape(work: Work) -> tuple[int, int, int]:
    """Return the full shape of scaled-down work."""
    ratios = {shape[1] / shape[0]: shape for shape in STEP_SHAPES}
    return ratios[work.completion / work.prompt]


def named(work: Work) -> str:
    """Name the full shape, and the factor by which it was scaled down."""
    shape = full_shape(work)
    return f"{'/'.join(map(str, shape))}, lengths / {shape[0] // work.prompt}"


def goals_page(results: Path) -> None:
    """Write goals.md from the available results."""
    rows = Rows(_rows(results / "memory.json"))
    steps = [
        pair for pair in pairs(_rows(results / "step.json")) if pair[0].vocabulary > MANY_ENTRIES
    ]
    goals = [*growth(rows), *sizes(rows)]
    for path, name in PEER_PATHS.items():
        goals += against_peer(rows, path, name)
    goals += [*methods(rows), *tokens(rows, steps), *speed(steps)]
    notes = NOTES + (ON_A_GPU if (results / "gpu.json").exists() else WITHOUT_A_GPU)
    text = f"{INTRODUCTION}\n{goal_table(goals)}\n{notes}"
    (results / "goals.md").write_text(text, encoding="utf-8")


def goal_table(goals: Iterable[Goal]) -> str:
    """Make a table with a row per goal."""
    return markdown(["figure", "goal", "measured", ""], [goal.line() for goal in goals])


MANY_ENTRIES = 1000  # of a vocabulary: below, the head costs next to nothing
INTRODUCTION = f"""# Goals and what was measured

Made by `make bench-report` from [memory](memory.md) and [step](step.md), which explain how
everything was measured. Shapes are prompt/completion/completions of a prompt; the peer is
{PEER.replace("-", " ")}. "Best settings" means the lowest peak that was measured on each side: with
the whole group or one completion in a micro-batch and, for this project, with its defaults, all
savings, or the smallest sizes. Elsewhere this project has its defaults, and the whole group is in
one micro-batch.
"""
NOTES = """
See also the gradients of all variants compared with the plain one ([certificate](invariance.md)),
predicted compared with measured peaks ([plan](plan.md)), and the bounded head compared with full
logits ([head](head.md)).
"""
ON_A_GPU = """
Goals and figures on a GPU: [here](gpu.md).
"""
WITHOUT_A_GPU = """
Not measured, for lack of a GPU: time and memory of the head at 8K tokens and 128K entries, what
returning cached blocks saves, running out of a device's memory, and the ratios above on a GPU.
`make bench-gpu` measures them on a machine with a GPU. Until then, the peer's GPU path is a lower
bound of what its release would hold there.
"""


def _rows(path: Path) -> list[Any]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
