"""The memory experiment and the step times on a GPU; says so and ends if there is none.

Results go to docs/benchmarks/gpu.json as they come. Peers that cannot be installed, for want of a
network, are left out; BENCH_SITE_TRL_1_16_0=folder names a folder with an installed one.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator

import environments
from memory import SETTINGS
from runs import RESULTS, Store, Work, execute
from step import PEER, run_in_turns, works

MEMORY_SETTINGS = ("first", "now", "plain", "head", "shared", "reuse", "all", "default")
MEMORY_SHAPES = ((3100, 53), (512, 256))
MEMORY_COUNTS = (2, 8, 16, 64)
MODELS = ("0.5b", "1.5b")


def memory_works() -> Iterator[tuple[str, Work]]:
    """The memory experiment with kernels of the GPU, each setting and size."""
    for count in MEMORY_COUNTS:
        for prompt, completion in MEMORY_SHAPES:
            for name in MEMORY_SETTINGS:
                sizes = {"prompt": prompt, "completion": completion, "completions": count}
                yield name, SETTINGS[name].work(device="cuda", **sizes)


def available(trainers: list[str]) -> set[str]:
    """Those trainers that this machine has or can install."""
    found = {"this"}
    for name in trainers:
        try:
            environments.make(name)
            found.add(name)
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{name}: left out ({error})", flush=True)
    return found


def measure_memory(store: Store, trainers: set[str]) -> None:
    """Add the missing rows of the memory experiment."""
    for name, work in memory_works():
        row = store.find(name, work)
        if work.trainer in trainers and not (row and "peak" in row["runs"][-1]):
            run = execute(work)
            store.add(name, work, run)
            text = f"{run['peak'] / 1e6:,.0f} MB" if "peak" in run else run["error"]
            print(f"{name} {work.prompt}/{work.completion}/{work.completions}: {text}", flush=True)


def main() -> None:
    """Measure on the GPU what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each trainer (default 3)")
    parser.add_argument("--parts", nargs="*", default=["memory", *MODELS], help="what to measure")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no GPU: skipped")
        return
    store = Store(RESULTS / "gpu.json")
    trainers = available(["trl-0.22.2", PEER])
    if "memory" in options.parts:
        measure_memory(store, trainers)
    chosen = tuple(name for name in ("this", PEER) if name in trainers)
    for shape in (model for model in MODELS if model in options.parts):
        for pair in works(1, {"shape": shape, "device": "cuda", "threads": 4}, chosen):
            run_in_turns(store, pair, options.rounds)


if __name__ == "__main__":
    main()
