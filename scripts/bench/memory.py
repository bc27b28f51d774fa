"""The memory experiment: the same update by every trainer, measured on one meter.

Each cell runs in its own process. Results are written to docs/benchmarks/memory.json as they
come, so a run that is stopped continues where it was; `report.py` makes tables and charts of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import environments
from runs import RESULTS, VOCABULARY, Store, Work, execute, peak_of

SCALE = 8  # by which the vocabulary of the original trainer is divided where it needs too much
SHAPES = ((3100, 53), (512, 53), (3100, 256), (512, 256))
COUNTS = (2, 4, 8, 16, 32, 64)
HEADLINE = (3100, 53)
REPEATED = (2, 8)  # completions of the headline shape that run three times
SLOW = ("old-full", "now")  # minutes and much memory a run: once
GENERATION_ROWS = 8

OFF: dict[str, Any] = {
    "shared_prefix": False,
    "logits_chunk_size": 0,
    "skip_zero_advantages": False,
    "reuse_sampling_logps": False,
    "empty_cache": "never",
    "log_memory": False,
}
HEAD = OFF | {"logits_chunk_size": None}
SHARED = HEAD | {"shared_prefix": True}
REUSE = SHARED | {"reuse_sampling_logps": True, "skip_zero_advantages": True}
ALL = REUSE | {"generation_max_rows": GENERATION_ROWS, "empty_cache": "auto"}


@dataclass(frozen=True)
class Setting:
    """A trainer with its options: a line of the tables."""

    title: str
    trainer: str = "this"
    vocabulary: int = VOCABULARY
    options: str = "{}"
    gpu_path: bool = False

    def work(self, **given: Any) -> Work:
        """A piece of work of two steps: the second one holds the states of the optimizer."""
        fixed = {name: getattr(self, name) for name in ("trainer", "options", "gpu_path")}
        return Work(**{"steps": 2, "vocabulary": self.vocabulary} | fixed | given)


SETTINGS = {
    "old": Setting(f"trl 0.20.0, vocabulary / {SCALE}", "trl-0.20.0", VOCABULARY // SCALE),
    "old-full": Setting("trl 0.20.0", "trl-0.20.0"),
    "first": Setting("trl 0.22.2", "trl-0.22.2"),
    "now": Setting("trl 1.16.0 on a CPU", "trl-1.16.0"),
    "now-gpu": Setting("trl 1.16.0, its GPU path, at least", "trl-1.16.0", gpu_path=True),
    "plain": Setting("this project, all savings off", options=json.dumps(OFF)),
    "head": Setting("+ bounded head", options=json.dumps(HEAD)),
    "shared": Setting("+ shared prompt", options=json.dumps(SHARED)),
    "reuse": Setting("+ no second pass", options=json.dumps(REUSE)),
    "all": Setting("+ bounded generation: all on", options=json.dumps(ALL)),
    "default": Setting("this project, defaults"),
}
PEERS = ("old", "old-full", "first", "now", "now-gpu")
OURS = tuple(name for name in SETTINGS if name not in PEERS)


class Cell(NamedTuple):
    """What is measured: a setting, its work, and how often."""

    setting: str
    work: Work
    runs: int = 1


def cells() -> Iterator[Cell]:
    """All cells, small ones first."""
    yield from proposal_cells()
    for count in COUNTS:
        for prompt, completion in SHAPES:
            headline = (prompt, completion) == HEADLINE
            for name, setting in SETTINGS.items():
                repeated = headline and count in REPEATED and name not in SLOW
                sizes = {"prompt": prompt, "completion": completion, "completions": count}
                work = setting.work(**sizes, timeline=headline and count == 8)
                yield Cell(name, work, 3 if repeated else 1)
    yield from other_cells()


def proposal_cells() -> Iterator[Cell]:
    """The string-level proposal, in settings like those of its report."""
    for name, counts in (("old", (2, 4, 8)), ("old-full", (2,))):
        for count in counts:
            for prompts in ("tokens", "strings-1024", "strings"):
                sizes = {"prompt": 3020, "completion": 100, "completions": count}
                yield Cell(name, SETTINGS[name].work(prompts=prompts, **sizes))


def other_cells() -> Iterator[Cell]:
    """One row at a time, GRPO, and the largest blocks at the peak."""
    for prompt in (512, 3100):
        for name in ("old", "first", "now", "now-gpu", "all", "default"):
            sizes = {"prompt": prompt, "completion": 53, "completions": 8}
            yield Cell(name, SETTINGS[name].work(micro_batch=1, **sizes))
    sizes = {"prompt": 3100, "completion": 53, "completions": 8}
    for name in ("now-gpu", "plain", "all", "default"):
        yield Cell(name, SETTINGS[name].work(algorithm="GRPO", **sizes))
    for name in ("old", "first", "now-gpu", "plain", "all", "default"):
        yield Cell(f"{name}/blocks", SETTINGS[name].work(explain=True, **sizes))
    sizes = {"prompt": 512, "completion": 53, "completions": 2}
    yield Cell("now/blocks", SETTINGS["now"].work(explain=True, **sizes))


def predicted(store: Store, cell: Cell) -> tuple[float, float]:
    """GB and minutes to expect: twice those of half as many completions, if these were measured."""
    half = replace(cell.work, completions=cell.work.completions // 2)
    row = store.find(cell.setting, half)
    if row is None:
        return 0.0, 0.0
    last = row["runs"][-1]
    if "predicted" in last:
        return 2 * last["predicted"][0], 2 * last["predicted"][1]
    if "peak" not in last:
        return 0.0, 0.0
    return 2 * peak_of(row) / 1e9, 2 * sum(last["seconds"].values()) / 60


def is_done(store: Store, cell: Cell) -> bool:
    """Whether all runs of a cell are there."""
    row = store.find(cell.setting, cell.work)
    return row is not None and sum("peak" in run for run in row["runs"]) >= cell.runs


def run_cell(store: Store, cell: Cell, limits: argparse.Namespace) -> None:
    """Measure what is missing of a cell, or write down why it is not measured."""
    gigabytes, minutes = predicted(store, cell)
    for limit, value, unit in ((limits.gb, gigabytes, "GB"), (limits.minutes, minutes, "minutes")):
        if value > limit:
            why = f"expected to take {value:.0f} {unit}, more than {limit:g}"
            store.add(cell.setting, cell.work, {"skipped": why, "predicted": [gigabytes, minutes]})
            print(f"{describe(cell)}: {why}", flush=True)
            return
    if cell.work.trainer in environments.PEERS:
        environments.make(cell.work.trainer)
    while not is_done(store, cell):
        run = execute(cell.work, limit_gb=limits.gb + 2, timeout=max(600, 240 * limits.minutes))
        store.add(cell.setting, cell.work, run)
        print(f"{describe(cell)}: {summary(run)}", flush=True)
        if "error" in run:
            return


def describe(cell: Cell) -> str:
    """A cell in a few words."""
    work = cell.work
    text = f"{cell.setting} {work.prompt}/{work.completion}/{work.completions}"
    text += f" micro-batch {work.micro_batch}" if work.micro_batch else ""
    text += f" {work.prompts}" if work.prompts != "tokens" else ""
    return text + (f" {work.algorithm}" if work.algorithm != "RLOO" else "")


def summary(run: dict[str, Any]) -> str:
    """A run in a few words."""
    if "peak" not in run:
        return run["error"]
    return f"{run['peak'] / 1e6:,.0f} MB, {sum(run['seconds'].values()):.0f} s"


def main() -> None:
    """Measure every cell that the command line asks for and that is not there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), help="settings to measure")
    parser.add_argument("--again", nargs="*", default=[], help="settings to forget first")
    parser.add_argument("--gb", type=float, default=14.0, help="most GB of a run (default 14)")
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="most minutes a run may be expected to take"
    )
    parser.add_argument("--largest", type=int, default=max(COUNTS), help="most completions")
    limits = parser.parse_args()
    for name in [*limits.only, *limits.again]:
        if name not in SETTINGS:
            parser.error(f"no setting {name!r}; the settings are {', '.join(SETTINGS)}")
    store = Store(RESULTS / "memory.json")
    store.drop({part for name in limits.again for part in (name, f"{name}/blocks")})
    for cell in cells():
        asked = cell.setting.split("/")[0] in limits.only
        if asked and cell.work.completions <= limits.largest and not is_done(store, cell):
            run_cell(store, cell, limits)


if __name__ == "__main__":
    main()
