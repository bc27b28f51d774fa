"""Run work with a trainer, and print its measurements as a line of JSON.

It runs in any environment: it imports the trainer that is installed there.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from runs import Work, parse_work


def main() -> None:
    """Measure the work of the command line."""
    work = parse_work(sys.argv[1:], __doc__)
    limit = int(float(os.environ.get("BENCH_LIMIT_GB", "0")) * 1e9)
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    import meter  # here, so that --help is fast

    if work.device == "cpu":
        meter.preload()
    sys.stdout.flush()
    line, sys.stdout = sys.stdout, sys.stderr  # trainers print as well
    result = measure(work)
    print(json.dumps(result), file=line, flush=True)


def measure(work: Work) -> dict[str, Any]:
    """Build the trainer, train, and collect peaks, seconds and tokens by phase."""
    import shortage
    import torch
    import trainers
    from meter import CpuBytes, CudaBytes, Meter, thin

    torch.set_num_threads(work.threads)
    memory = CpuBytes() if work.device == "cpu" else CudaBytes()
    meter = Meter(memory)
    meter.install()
    trainer, applied = trainers.build(work, meter)
    steps = trainers.StepMarks(meter)
    trainer.add_callback(steps)
    trial = shortage.Trial(trainer, json.loads(os.environ.get("BENCH_TRIAL", "{}")))
    if work.timeline and work.device == "cpu":
        memory.record()
    watch = memory.watch() if work.explain and work.device == "cpu" else None
    gc.collect()
    meter.start()
    trial.begin()
    with watch or contextlib.nullcontext(), leave_out(work):
        trainer.train()
    totals = meter.totals()
    result = {"peak": memory.peak(), "phase_peaks": memory.phase_peaks()} | rounded(totals)
    result |= {"scratch": memory.scratch(), "steps": steps.each(), "options": applied}
    result |= {"held_before": memory.start} | trial.end()
    result["weights_bytes"] = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    if work.timeline and work.device == "cpu":
        result["timeline"] = thin(memory.timeline())
    if watch is not None:
        result["blocks"] = watch.blocks()[:16]
    if work.gpu_path:
        import gpu_path

        result["launches"] = gpu_path.Launcher.launched
    return result | {"versions": versions(work)}


def leave_out(work: Work) -> contextlib.AbstractContextManager[Any]:
    """Return what is not counted: copies that a GPU may not make, if its path runs on a CPU."""
    if not work.gpu_path:
        return contextlib.nullcontext()
    import gpu_path

    return gpu_path.LeaveOutCopies()


def rounded(totals: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Round seconds to milliseconds, and counts to integers."""
    return {
        name: {k: round(v, 3) if "seconds" in name else int(v) for k, v in counted.items()}
        for name, counted in totals.items()
    }


def versions(work: Work) -> dict[str, str]:
    """Return the versions of the packages involved."""
    versions = {"trl": "this project"} if work.trainer == "this" else {}
    for package in ("trl", "torch", "transformers", "accelerate", "datasets"):
        with contextlib.suppress(PackageNotFoundError):
            versions.setdefault(package, version(package))
    if work.device == "cuda":
        import torch

        versions["gpu"] = torch.cuda.get_device_name()
    return versions


if __name__ == "__main__":
    main()
