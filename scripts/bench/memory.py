"""The memory experiment: the same update by every trainer, measured on one meter.

Each cell runs in its own process. Results are written to docs/benchmarks/memory.json as they
come, so a run that is stopped continues where it was; `report.py` makes tables and charts of them.
That file is part of the repository, so a clean clone measures only what it lacks: `--again`
measures anew, and `--results folder` does so into another file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import environments
from runs import GROUPS, RESULTS, VOCABULARY, Store, Work, execute, peak_of

SCALE = 8  # by which the vocabulary of the original trainer is divided where it needs too much
SHAPES = ((3100, 53), (512, 53), (3100, 256), (512, 256))
COUNTS = (2, 4, 8, 16, 32, 64)
HEADLINE = (3100, 53)
GENERATION_SHAPES = ((512, 256), HEADLINE)  # where the peaks of generation are shown
REPEATED = (2, 8)  # completions of the headline shape that run three times
SLOW = ("old-full", "now")  # minutes and much memory a run: once
GENERATION_ROWS = 8
METHODS = {"OnlineDPO": ("now", "now-gpu"), "PPO": ("first",)}  # and the peers that have them
METHOD_SHAPES = (HEADLINE, (512, 256))
METHOD_COUNT = 8  # completions where the vocabulary is the smaller one; else those of a prompt
BEST_COUNTS = (2, 8)  # completions at which the best settings of each side are looked for

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
LEAN = ALL | {"generation_max_rows": 2, "logits_chunk_size": 2**18}


@dataclass(frozen=True)
class Setting:
    """A trainer with its options: a row of the tables."""

    title: str
    trainer: str = "this"
    vocabulary: int = VOCABULARY
    options: str = "{}"
    gpu_path: bool = False

    def work(self, **fields: Any) -> Work:
        """Return work of two steps. In the second one, the optimizer states exist."""
        fixed = {name: getattr(self, name) for name in ("trainer", "options", "gpu_path")}
        return Work(**{"steps": 2, "vocabulary": self.vocabulary} | fixed | fields)


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
    "lean": Setting("+ the smallest sizes", options=json.dumps(LEAN)),
    "default": Setting("this project, defaults"),
}
PEERS = ("old", "old-full", "first", "now", "now-gpu")
OURS = tuple(name for name in SETTINGS if name not in PEERS)


class Cell(NamedTuple):
    """A measurement: a setting, its work, and the number of runs."""

    setting: str
    work: Work
    runs: int = 1


def cells(parts: Sequence[str] = ()) -> Iterator[Cell]:
    """Yield the cells of some parts of the experiment, or of all, small ones first."""
    for name, part in PARTS.items():
        if name in parts or not parts:
            yield from part()


def shape_cells() -> Iterator[Cell]:
    """Each setting at each shape and number of completions."""
    for count in COUNTS:
        for prompt, completion in SHAPES:
            headline = (prompt, completion) == HEADLINE
            for name, setting in SETTINGS.items():
                if name == "lean":  # see `best_cells`
                    continue
                repeated = headline and count in REPEATED and name not in SLOW
                sizes = {"prompt": prompt, "completion": completion, "completions": count}
                work = setting.work(**sizes, timeline=headline and count == 8)
                yield Cell(name, work, 3 if repeated else 1)


def best_cells() -> Iterator[Cell]:
    """Yield cells of the most economical settings: one completion per micro-batch."""
    for prompt, completion in sorted(SHAPES):
        for count in BEST_COUNTS:
            sizes = {"prompt": prompt, "completion": completion, "completions": count}
            yield Cell("lean", SETTINGS["lean"].work(**sizes))
            for name in ("lean", "now-gpu"):
                yield Cell(name, SETTINGS[name].work(micro_batch=1, **sizes))
    for prompt, completion in GENERATION_SHAPES:
        sizes = {"prompt": prompt, "completion": completion, "completions": max(COUNTS)}
        yield Cell("lean", SETTINGS["lean"].work(**sizes))


def proposal_cells() -> Iterator[Cell]:
    """Yield cells of the string-level proposal, in settings like those of its report."""
    for name, counts in (("old", (2, 4, 8)), ("old-full", (2,))):
        for count in counts:
            for prompts in ("tokens", "strings-1024", "strings"):
                sizes = {"prompt": 3020, "completion": 100, "completions": count}
                yield Cell(name, SETTINGS[name].work(prompts=prompts, **sizes))


def other_cells() -> Iterator[Cell]:
    """Yield cells with one row at a time, with GRPO, and for the largest blocks at the peak."""
    for prompt in (512, 3100):
        for name in ("old", "first", "now", "all", "default"):
            sizes = {"prompt": prompt, "completion": 53, "completions": 8}
            yield Cell(name, SETTINGS[name].work(micro_batch=1, **sizes))
    sizes = {"prompt": 3100, "completion": 53, "completions": 8}
    for name in ("now-gpu", "plain", "all", "default"):
        yield Cell(name, SETTINGS[name].work(algorithm="GRPO", **sizes))
    for name in ("old", "first", "now-gpu", "plain", "all", "default"):
        yield Cell(f"{name}/blocks", SETTINGS[name].work(explain=True, **sizes))
    sizes = {"prompt": 512, "completion": 53, "completions": 2}
    yield Cell("now/blocks", SETTINGS["now"].work(explain=True, **sizes))


def method_cells() -> Iterator[Cell]:
    """Yield cells of Online DPO (pairs of completions) and PPO (single ones), with their peers."""
    for method, peers, sizes in method_sizes():
        for name in (*peers, "default"):
            scale = {"vocabulary": method_vocabulary(sizes)}
            yield Cell(name, SETTINGS[name].work(algorithm=method, **sizes, **scale))


def method_sizes() -> Iterator[tuple[str, tuple[str, ...], dict[str, int]]]:
    """Yield each further method with its peers and the sizes of an update."""
    for method, (prompt, completion) in product(METHODS, METHOD_SHAPES):
        for count in (GROUPS[method], METHOD_COUNT):
            sizes = {"prompt": prompt, "completion": completion, "completions": count}
            yield method, METHODS[method], sizes


def method_vocabulary(sizes: dict[str, int]) -> int:
    """Return the vocabulary size for these sizes."""
    return VOCABULARY // (SCALE if sizes["completions"] == METHOD_COUNT else 1)


def size_words(sizes: dict[str, int]) -> str:
    """Format sizes as in the tables."""
    return "{prompt:,}/{completion}/{completions}".format(**sizes)


PARTS: dict[str, Callable[[], Iterator[Cell]]] = {
    "proposal": proposal_cells,
    "shapes": shape_cells,
    "best": best_cells,
    "other": other_cells,
    "methods": method_cells,
}


def predicted(store: Store, cell: Cell) -> tuple[float, float]:
    """Predict GB and minutes: twice those of half as many completions, if they were measured."""
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
    """Return whether all runs of a cell are in the store."""
    row = store.find(cell.setting, cell.work)
    return row is not None and sum("peak" in run for run in row["runs"]) >= cell.runs


def run_cell(store: Store, cell: Cell, limits: argparse.Namespace) -> None:
    """Measure the missing runs of a cell, or record why it is skipped."""
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
    """Describe a cell."""
    work = cell.work
    text = f"{cell.setting} {work.prompt}/{work.completion}/{work.completions}"
    text += f" micro-batch {work.micro_batch}" if work.micro_batch else ""
    text += f" {work.prompts}" if work.prompts != "tokens" else ""
    return text + (f" {work.algorithm}" if work.algorithm != "RLOO" else "")


def summary(run: dict[str, Any]) -> str:
    """Summarize a run."""
    if "peak" not in run:
        return run["error"]
    return f"{run['peak'] / 1e6:,.0f} MB, {sum(run['seconds'].values()):.0f} s"


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = ", ".join(SETTINGS)
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), help=f"some of {names}")
    parser.add_argument(
        "--parts", nargs="*", default=[], help=f"parts to measure, of {', '.join(PARTS)}"
    )
    parser.add_argument("--prompts", nargs="*", type=int, default=[], help="lengths of prompts")
    parser.add_argument(
        "--again", nargs="*", help="forget what was measured of these settings; none named: of all"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of memory.json")
    parser.add_argument("--gb", type=float, default=14.0, help="most GB of a run (default 14)")
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="most minutes a run may be expected to take"
    )
    parser.add_argument("--largest", type=int, default=max(COUNTS), help="most completions")
    chosen = parser.parse_args()
    chosen.again = list(SETTINGS) if chosen.again == [] else chosen.again or []
    for chosen_names, legal_names in (
        (chosen.only + chosen.again, SETTINGS),
        (chosen.parts, PARTS),
    ):
        for name in chosen_names:
            if name not in legal_names:
                parser.error(f"{name!r} is none of {', '.join(legal_names)}")
    return chosen


def is_asked(cell: Cell, chosen: argparse.Namespace) -> bool:
    """Return whether the command line selects a cell."""
    return (
        cell.setting.split("/")[0] in chosen.only
        and cell.work.completions <= chosen.largest
        and (not chosen.prompts or cell.work.prompt in chosen.prompts)
    )


def main() -> None:
    """Measure every selected cell that the results file lacks."""
    chosen = arguments()
    store = Store(chosen.results / "memory.json")
    store.drop({part for name in chosen.again for part in (name, f"{name}/blocks")})
    asked = [cell for cell in cells(chosen.parts) if is_asked(cell, chosen)]
    missing = [cell for cell in asked if not is_done(store, cell)]
    print(f"{len(missing)} of {len(asked)} cells are not measured yet", flush=True)
    for cell in missing:
        run_cell(store, cell, chosen)


if __name__ == "__main__":
    main()
