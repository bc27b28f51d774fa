"""Everything that needs a GPU, by one command; says so and ends if there is none.

Results go to docs/benchmarks/gpu.json as they come, so a run that is stopped continues where it
was; at the end docs/benchmarks/gpu.md and its charts are written. Peers that cannot be installed,
for want of a network, are left out; BENCH_SITE_TRL_1_16_0=folder names a folder with an installed
one.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import environments
import step
from memory import BEST_COUNTS, SETTINGS
from runs import RESULTS, Identified, Store, Work, execute

POLICIES = ("never", "auto", "always")
BF16 = json.dumps({"model_init_kwargs": {"dtype": "bfloat16"}})
SHORTAGE = {"gradient_checkpointing": False, "optim": "sgd", "learning_rate": 0.1}
PARTS = {  # the short ones first
    "head": "the bounded head at 8K tokens and 128K entries",
    "shortage": "a real recovery from running out of memory",
    "cache": "what empty_cache saves",
    "memory": "peaks of this project and its peers",
    "steps": "step times, in bf16, of models of 0.5 and 1.5 billion weights",
}


@dataclass(frozen=True)
class Plan:
    """The sizes of all measurements; lengths are in tokens."""

    settings: tuple[str, ...] = tuple(
        name
        for name in SETTINGS
        if name != "now-gpu"  # on a GPU that is what `now` does
    )
    shapes: tuple[tuple[int, int], ...] = ((3100, 53), (512, 256))
    counts: tuple[int, ...] = (2, 8, 16, 64)
    models: tuple[str, ...] = ("0.5b", "1.5b")
    vocabulary: int = Work.vocabulary
    scale: int = 1  # divides the lengths of step times
    head: tuple[str, ...] = ("8192,4096,128256", "16384,2048,248320", "8192,1536,151936")
    policies: tuple[str, ...] = POLICIES
    cache: Work = Work(
        prompt=1024, completion=512, completions=16, steps=5, shape="0.5b", ragged=True
    )
    shortage: Work = Work(
        prompt=64,
        completion=512,
        completions=32,
        vocabulary=32_000,
        steps=2,
        shape="57m",
        options=json.dumps(SHORTAGE),
    )


QUICK = Plan(settings=("default", "now"), shapes=((3100, 53), (512, 256)))

# Shows on a CPU that the program works. Float32, as oneDNN names no shortage of memory, and whole
# logits, so that what does not fit is large.
TINY = Plan(
    settings=("lean",),
    shapes=((512, 256),),
    counts=(2,),
    models=("tiny",),
    vocabulary=1000,
    scale=32,
    head=("64,16,1000",),
    policies=("always",),
    cache=Work(prompt=16, completion=8, vocabulary=1000, ragged=True),
    shortage=Work(
        prompt=16,
        completion=32,
        completions=32,
        vocabulary=8000,
        options=json.dumps(SHORTAGE | {"bf16": False, "logits_chunk_size": 0, "log_memory": False}),
    ),
)


@dataclass(frozen=True)
class Bench:
    """The device and the trainers of the measurements."""

    store: Store
    plan: Plan
    device: str
    rounds: int
    trainers: set[str]
    end: float = math.inf  # on the clock of `time.monotonic`; nothing begins after it

    def is_over(self) -> bool:
        """Whether the time limit has passed."""
        return time.monotonic() > self.end

    def once(self, setting: str, work: Identified, run: Callable[[], dict[str, Any]]) -> None:
        """Add a run unless there is a successful one."""
        row = self.store.find(setting, work)
        if self.is_over() or (row and "peak" in row["runs"][-1]):
            return
        result = run()
        self.store.add(setting, work, result)
        text = f"{result['peak'] / 1e6:,.0f} MB" if "peak" in result else result["error"]
        print(f"{setting} {work.identity()}: {text}", flush=True)


@dataclass(frozen=True)
class HeadWork:
    """A shape of the output head."""

    shape: str
    device: str

    def identity(self) -> dict[str, Any]:
        """Return its sizes."""
        return {"shape": list(map(int, self.shape.split(","))), "device": self.device}


def memory_works(plan: Plan, device: str) -> Iterator[tuple[str, Work]]:
    """Yield the cells of the memory experiment: all settings and sizes, and the best row by row."""
    for count in plan.counts:
        for prompt, completion in plan.shapes:
            for name in plan.settings:
                sizes = {"prompt": prompt, "completion": completion, "completions": count}
                work = SETTINGS[name].work(device=device, **sizes)
                yield name, work
                if name in ("lean", "now") and count in BEST_COUNTS:
                    yield name, replace(work, micro_batch=1)


def measure_memory(bench: Bench) -> None:
    """The memory experiment."""
    for name, work in memory_works(bench.plan, bench.device):
        if work.trainer in bench.trainers:
            bench.once(name, work, lambda work=work: execute(work))


def measure_steps(bench: Bench) -> None:
    """Measure the step times of each model, with weights in float32 and bfloat16."""
    chosen = tuple(name for name in ("this", step.PEER) if name in bench.trainers)
    for shape in bench.plan.models:
        for options in ("{}", BF16):
            model = {"shape": shape, "device": bench.device, "threads": 4, "options": options}
            model |= {"vocabulary": bench.plan.vocabulary}
            for pair in step.works(bench.plan.scale, model, chosen):
                if bench.is_over():
                    return
                step.run_in_turns(bench.store, pair, bench.rounds)


def measure_head(bench: Bench) -> None:
    """Measure time and memory of the bounded head, compared with full logits."""
    for shape in bench.plan.head:
        run = lambda shape=shape: run_head(shape, bench.device, bench.rounds)  # noqa: E731
        bench.once("head", HeadWork(shape, bench.device), run)


def run_head(shape: str, device: str, rounds: int) -> dict[str, Any]:
    """Measure one shape in its own process; `peak` is for the default chunk size."""
    command = [sys.executable, str(Path(__file__).with_name("head.py")), "--json"]
    command += ["--device", device, "--shapes", shape, "--rounds", str(max(rounds, 2))]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        return {"error": process.stderr[-400:]}
    result = json.loads(process.stdout.splitlines()[-1])
    figures = result["figures"][0]
    peak = next(figure["peak"] for figure in figures if figure["default"])
    versions = {"gpu": result["where"]} if device == "cuda" else {}
    return {"peak": peak, "figures": figures, "versions": versions}


def measure_cache(bench: Bench) -> None:
    """Measure what returning cached blocks saves and costs, with a process per policy."""
    for policy in bench.plan.policies:
        options = json.dumps({"empty_cache": policy})
        work = replace(bench.plan.cache, device=bench.device, options=options)
        bench.once(f"empty_cache={policy}", work, lambda work=work: execute(work))


def measure_shortage(bench: Bench) -> None:
    """Measure the recovery from running out of memory."""
    import shortage

    work = replace(bench.plan.shortage, device=bench.device)
    bench.once("shortage", work, lambda: shortage.recovered(work))


MEASURES = {
    "head": measure_head,
    "shortage": measure_shortage,
    "cache": measure_cache,
    "memory": measure_memory,
    "steps": measure_steps,
}


def available(trainers: set[str], installed: bool = False) -> set[str]:
    """Return the trainers that are installed or, unless `installed` is set, can be installed."""
    ready = {"this"}
    for name in sorted(trainers - ready):
        if installed and not (environments.is_ready(name) or environments.site(name)):
            continue
        try:
            environments.make(name)
            ready.add(name)
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{name}: left out ({error})", flush=True)
    return ready


def main() -> None:
    """Measure on the GPU what the results file lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each trainer (default 3)")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS, help="which")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="after which no measurement begins"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="the least sizes, to try the program")
    parser.add_argument(
        "--quick", action="store_true", help="defaults alone; peers only where they are installed"
    )
    options = parser.parse_args()
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"no GPU: skipped. On one, this measures {'; '.join(PARTS.values())}.")
        return
    plan = Plan()
    if options.tiny:
        plan = TINY
    elif options.quick:
        plan = QUICK
    needed_trainers = {
        SETTINGS[name].trainer for name in plan.settings if "memory" in options.parts
    }
    needed_trainers |= {step.PEER} if "steps" in options.parts else set()
    store = Store(options.results / "gpu.json")
    end = time.monotonic() + 60 * options.minutes
    trainers = available(needed_trainers, options.quick)
    bench = Bench(store, plan, options.device, options.rounds, trainers, end)
    for name in options.parts:
        MEASURES[name](bench)
    import gpu_report

    gpu_report.gpu_page(options.results)
    print(options.results / "gpu.md")


if __name__ == "__main__":
    main()
