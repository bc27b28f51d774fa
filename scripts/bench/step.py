"""Measure the time of an optimizer step by phase, alternating with the current peer.

Every run is its own process. The two trainers alternate, so that what else the machine does meets
both alike, and each pair gives one ratio. Results go to docs/benchmarks/step.json as they come.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import environments
from runs import RESULTS, Store, Work, execute

PEER = "trl-1.16.0"
SHAPES = ((2048, 256, 8), (512, 512, 8), (64, 1024, 8))
BETA = {"RLOO": 0.05, "GRPO": 0.0}  # the default of each algorithm
STEPS = 3  # the first one warms up
CPU_SCALE = 4  # by which lengths are divided on a CPU
CPU_MODEL = {"shape": "small", "vocabulary": 32_000, "device": "cpu"}
TRAINING = ("scoring", "forward", "backward", "optimizer")


def works(scale: int, model: dict[str, Any], trainers: tuple[str, ...]) -> Iterator[list[Work]]:
    """Return the compared works, in a list for each algorithm and shape."""
    for algorithm, beta in BETA.items():
        for prompt, completion, group in SHAPES:
            sizes = {"prompt": prompt // scale, "completion": completion // scale}
            common = sizes | {"completions": group, "algorithm": algorithm, "beta": beta}
            yield [Work(trainer=name, steps=STEPS, **common, **model) for name in trainers]


def run_in_turns(store: Store, pair: list[Work], rounds: int) -> None:
    """Run the works of a list in turn until all have `rounds` runs; an error ends the list."""
    for number in range(rounds):
        for work in pair:
            if successes(store, work) > number:
                continue
            run = execute(work)
            store.add(work.trainer, work, run)
            text = f"{phase_seconds(run)['total']:.2f} s a step" if "peak" in run else run["error"]
            print(f"{work.algorithm} {work.trainer} {sizes_of(work)}: {text}", flush=True)
            if "error" in run:
                return


def successes(store: Store, work: Work) -> int:
    """Return the number of successful runs of a work."""
    row = store.find(work.trainer, work)
    return sum("peak" in run for run in row["runs"]) if row else 0


def sizes_of(work: Work) -> str:
    """Format prompt length, completion length and completions of a work."""
    return f"{work.prompt}/{work.completion}/{work.completions}"


def phase_seconds(run: dict[str, Any], clock: str = "seconds") -> dict[str, float]:
    """Return the seconds of a step by phase: the median over the steps after the first.

    `training` is scoring, forward, backward and optimizer together; `total` is the whole step.
    """
    steps = [step[clock] for step in run["steps"][1:] or run["steps"]]
    phases = sorted({name for step in steps for name in step})
    medians = {name: median(step.get(name, 0.0) for step in steps) for name in phases}
    training = [sum(step.get(name, 0.0) for name in TRAINING) for step in steps]
    return medians | {"training": median(training), "total": median(sum(s.values()) for s in steps)}


def main() -> None:
    """Measure on the CPU what the results file lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each trainer (default 3)")
    parser.add_argument("--scale", type=int, default=CPU_SCALE, help="divides all lengths")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of a run")
    parser.add_argument("--again", action="store_true", help="forget what was measured before")
    options = parser.parse_args()
    path: Path = RESULTS / "step.json"
    store = Store(path)
    if options.again:
        store.drop({"this", PEER})
    environments.make(PEER)
    model = CPU_MODEL | {"threads": options.threads}
    # With few vocabulary entries the head costs next to nothing, whichever way it is computed.
    for entries in (CPU_MODEL["vocabulary"], 512):
        for pair in works(options.scale, model | {"vocabulary": entries}, ("this", PEER)):
            run_in_turns(store, pair, options.rounds)


if __name__ == "__main__":
    main()
