"""Time and memory of the bounded head against full logits: writes docs/benchmarks/head.md.

A forward and a backward pass of log-probabilities from hidden states. Runs alternate; the table has
the median of the ratios to full logits in the same round, and their range.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from trl.memory.tensor_bytes import TensorBytes
from trl.ops.linear_logprobs import Tiling, linear_log_probs

ROOT = Path(__file__).parents[2]
# tokens, hidden size, vocabulary
SHAPES = {
    "cpu": [(1024, 64, 151_936), (1024, 576, 49_152), (512, 1024, 128_256)],
    "cuda": [(8192, 4096, 128_256), (8192, 1536, 151_936)],
}
CHUNKS = {"cpu": [2**18, 2**20, 2**22, 2**24], "cuda": [2**24, 2**25, 2**26, 2**27, 2**28]}


def full_logits(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """The plain way: logits, log-softmax in float32, and the chosen entries."""
    return (hidden @ weight.t()).float().log_softmax(-1).gather(1, ids[:, None]).squeeze(1)


def bounded(chunk: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The bounded head that holds `chunk` logits at once."""
    return lambda hidden, weight, ids: linear_log_probs(
        hidden, weight, ids, None, Tiling(chunk=chunk)
    )[0]


def measure(run: Callable[[], None], device: str) -> tuple[float, float]:
    """Seconds of a run, and the bytes at its peak above what was held before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return time.perf_counter() - started, torch.cuda.max_memory_allocated() - before
    started = time.process_time()
    run()
    return time.process_time() - started, float("nan")


def peak_on_cpu(run: Callable[[], None], inputs: list[Tensor]) -> float:
    """Bytes at the peak of tensors that operations return, above the inputs."""
    for tensor in inputs:
        tensor.grad = None
    with TensorBytes(inputs) as counter:
        before = counter.live
        run()
    return counter.peak - before


def rows(device: str, dtype: torch.dtype, rounds: int) -> list[list[str]]:
    """One line of the table for each shape and chunk."""
    found = []
    for tokens, size, vocabulary in SHAPES[device]:
        hidden = torch.randn(tokens, size, device=device, dtype=dtype, requires_grad=True)
        weight = torch.randn(vocabulary, size, device=device).mul_(size**-0.5).to(dtype)
        weight.requires_grad_()
        ids = torch.randint(vocabulary, (tokens,), device=device)
        upstream = torch.randn(tokens, device=device)

        def step(function: Callable[..., Tensor]) -> Callable[[], None]:
            def run() -> None:
                hidden.grad = weight.grad = None
                function(hidden, weight, ids).backward(upstream)

            return run

        ways = {0: step(full_logits)} | {chunk: step(bounded(chunk)) for chunk in CHUNKS[device]}
        times: dict[int, list[float]] = {chunk: [] for chunk in ways}
        peaks = {}
        for _ in range(rounds):
            for chunk, run in ways.items():
                seconds, peaks[chunk] = measure(run, device)
                times[chunk].append(seconds)
        if device == "cpu":
            peaks = {
                chunk: peak_on_cpu(run, [hidden, weight, ids, upstream])
                for chunk, run in ways.items()
            }
        gradients = hidden.nbytes + weight.nbytes
        peaks = {chunk: peak - gradients for chunk, peak in peaks.items()}
        for chunk in CHUNKS[device]:
            ratios = [a / b for a, b in zip(times[chunk], times[0], strict=True)]
            found.append(
                [
                    f"{tokens} x {size} x {vocabulary:,}",
                    f"{chunk:,}",
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                    f"{peaks[chunk] / 1e6:,.0f}",
                    f"{peaks[0] / 1e6:,.0f}",
                    f"{peaks[0] / peaks[chunk]:.1f}",
                ]
            )
    return found


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks" / "head.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = rows(device, torch.float32, options.rounds)
    names = ["tokens x hidden x vocabulary", "logits held", "time / full logits"]
    names += ["peak, MB", "full logits, MB", "full / bounded"]
    lines = [names, ["---"] * len(names), *table]
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {options.threads} thread"
    text = (
        "# Bounded head against full logits\n\n"
        "Forward and backward pass of log-probabilities in float32. Peaks are beyond the inputs and "
        "their gradients, which both must hold. Times are process time on a CPU and wall time on a GPU; "
        f"ratios are the median of {options.rounds} alternating rounds, with their range.\n\n"
        f"Made by `make bench-head` on {name}, {platform.machine()}, torch {torch.__version__}.\n\n"
        + "\n".join("| " + " | ".join(line) + " |" for line in lines)
        + "\n"
    )
    print(text)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
