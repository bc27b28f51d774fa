"""Time and memory of the bounded head against full logits: writes docs/benchmarks/head.md.

A forward and a backward pass of log-probabilities from hidden states. Runs alternate; the table has
the median of the ratios to full logits in the same round, and their range.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from head_table import HEADERS, METHOD, lines
from runs import RESULTS
from tables import markdown
from torch import Tensor

from trl.ops.linear_logprobs import Tiling, default_chunk, linear_log_probs

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from tensor_bytes import TensorBytes

# tokens, hidden size, vocabulary
SHAPES = {
    "cpu": [(1024, 64, 151_936), (1024, 576, 49_152), (512, 1024, 128_256)],
    "cuda": [(8192, 4096, 128_256), (8192, 1536, 151_936)],
}
CHUNKS = {"cpu": [2**18, 2**20, 2**22, 2**24], "cuda": [2**24, 2**25, 2**26, 2**27, 2**28]}


Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def full_logits(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Compute log-probabilities from full logits, by a log-softmax in float32."""
    return (hidden @ weight.t()).float().log_softmax(-1).gather(1, ids[:, None]).squeeze(1)


def bounded(chunk: int) -> Way:
    """Compute log-probabilities with the bounded head, which holds `chunk` logits at once."""
    return lambda hidden, weight, ids: linear_log_probs(
        hidden, weight, ids, None, Tiling(chunk=chunk)
    )[0]


def measure(run: Callable[[], None], device: str) -> tuple[float, float]:
    """Return the seconds of a run, and its peak bytes above the start."""
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
    """Return peak bytes of the tensors that operations return, without the inputs."""
    for tensor in inputs:
        tensor.grad = None
    with TensorBytes(inputs) as counter:
        before = counter.live
        run()
    return counter.peak - before


@dataclass
class Inputs:
    """Hidden states, weight, ids and upstream gradient of one shape."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    upstream: Tensor

    @classmethod
    def of(cls, shape: tuple[int, int, int], device: str) -> Inputs:
        """Make random inputs in float32."""
        tokens, size, vocabulary = shape
        weight = torch.randn(vocabulary, size, device=device).mul_(size**-0.5)
        return cls(
            torch.randn(tokens, size, device=device, requires_grad=True),
            weight.requires_grad_(),
            torch.randint(vocabulary, (tokens,), device=device),
            torch.randn(tokens, device=device),
        )

    def step(self, function: Way) -> Callable[[], None]:
        """Run a forward and a backward pass."""

        def run() -> None:
            self.hidden.grad = self.weight.grad = None
            function(self.hidden, self.weight, self.ids).backward(self.upstream)

        return run


def figures(shape: tuple[int, int, int], device: str, rounds: int) -> list[dict[str, Any]]:
    """Return the measurements of one shape, for each number of logits held at once.

    Returns:
        `list`: dictionaries with `chunk` and whether it is the `default`, `ratios` of time to full
        logits, one for each round, and the bytes `peak` and `full_peak`.
    """
    inputs = Inputs.of(shape, device)
    ways = {0: inputs.step(full_logits)}
    default = default_chunk(torch.device(device))
    ways |= {chunk: inputs.step(bounded(chunk)) for chunk in sorted({*CHUNKS[device], default})}
    times: dict[int, list[float]] = {chunk: [] for chunk in ways}
    peaks: dict[int, float] = {}
    for _ in range(rounds):
        for chunk, run in ways.items():
            seconds, peaks[chunk] = measure(run, device)
            times[chunk].append(seconds)
    if device == "cpu":
        tensors = [inputs.hidden, inputs.weight, inputs.ids, inputs.upstream]
        peaks = {chunk: peak_on_cpu(run, tensors) for chunk, run in ways.items()}
    gradients = inputs.hidden.nbytes + inputs.weight.nbytes
    return [
        {
            "chunk": chunk,
            "default": chunk == default,
            "ratios": [a / b for a, b in zip(times[chunk], times[0], strict=True)],
            "peak": peaks[chunk] - gradients,
            "full_peak": peaks[0] - gradients,
        }
        for chunk in ways
        if chunk
    ]


def page(figures_by_shape: dict[tuple[int, int, int], list[dict[str, Any]]], where: str) -> str:
    """Make the page."""
    table = [
        line
        for shape, shape_figures in figures_by_shape.items()
        for line in lines(shape, shape_figures)
    ]
    provenance = (
        f"Made by `make bench-head` on {where}, {platform.machine()}, torch {torch.__version__}."
    )
    text = f"{METHOD}\n{provenance}\n\n{markdown(HEADERS, table)}\n"
    return f"# Bounded head against full logits\n\n{text}"


def sizes(text: str) -> tuple[int, int, int]:
    """Read tokens,hidden,vocabulary."""
    tokens, size, vocabulary = map(int, text.split(","))
    return tokens, size, vocabulary


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=tuple(SHAPES), help="default: cuda if there is one")
    parser.add_argument(
        "--shapes", nargs="*", type=sizes, help="tokens,hidden,vocabulary instead of the usual"
    )
    parser.add_argument("--json", action="store_true", help="print figures, write no page")
    parser.add_argument("--output", type=Path, default=RESULTS / "head.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    shapes = options.shapes or SHAPES[device]
    figures_by_shape = {shape: figures(shape, device, options.rounds) for shape in shapes}
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {options.threads} thread"
    if options.json:
        print(json.dumps({"where": where, "figures": list(figures_by_shape.values())}))
        return
    text = page(figures_by_shape, where)
    print(text)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
