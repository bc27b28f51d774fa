"""Peak bytes, seconds and tokens by phase of one training run, on a CPU or a GPU.

The meter knows no trainer. It watches `generate` of transformers, every outermost forward pass of
a model, the backward pass and the optimizer. A phase lasts until the next one begins, so what
follows a forward pass without gradient (a log-softmax, say) still counts as scoring.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / ".bench"
PHASES = ("other", "generation", "scoring", "forward", "backward", "optimizer")
POINTS = 240  # of a timeline that is kept


def build_library() -> Path:
    """Compile the library that counts bytes, unless it is up to date."""
    source = Path(__file__).with_name("cpumem.c")
    library = BENCH / "libcpumem.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        BENCH.mkdir(exist_ok=True)
        fresh = library.with_suffix(f".{os.getpid()}")
        flags = ["-O2", "-fPIC", "-shared", "-o", str(fresh), str(source), "-ldl", "-lpthread"]
        subprocess.run(["gcc", *flags], check=True)
        fresh.replace(library)  # another process may be building it too
    return library


def preload() -> None:
    """Restart this program with the counting library preloaded, unless it is already."""
    if "libcpumem" not in os.environ.get("LD_PRELOAD", ""):
        os.environ["LD_PRELOAD"] = str(build_library())
        os.execv(sys.executable, [sys.executable, *sys.argv])


class CpuBytes:
    """Bytes of torch's CPU allocator, temporaries inside operations included; needs `preload`."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        for name in ("cpumem_live", "cpumem_peak", "cpumem_phase_peak"):
            getattr(self._library, name).restype = ctypes.c_int64
        self._library.cpumem_record.argtypes = [ctypes.c_int, ctypes.c_int64]
        self._library.cpumem_watch.argtypes = [ctypes.c_int64]

    def reset(self) -> None:
        """Reset all peaks to what is held now."""
        self._library.cpumem_reset()
        self.start = self._library.cpumem_live(0)

    def enter(self, phase: str) -> None:
        """Start counting for a phase."""
        self._library.cpumem_phase(PHASES.index(phase))

    def peak(self) -> int:
        """Return the peak bytes above the start."""
        return self._library.cpumem_peak(0) - self.start

    def scratch(self) -> int:
        """Return peak bytes of aligned blocks that `peak` does not count, such as oneDNN's."""
        return self._library.cpumem_peak(1)

    def phase_peaks(self) -> dict[str, int]:
        """Return the peak bytes above the start, by phase."""
        peaks = {p: self._library.cpumem_phase_peak(i, 0) for i, p in enumerate(PHASES)}
        return {phase: peak - self.start for phase, peak in peaks.items() if peak}

    def record(self, step: int = 200_000, room: int = 2_000_000) -> None:
        """Keep a timeline of every change of at least `step` bytes."""
        self._library.cpumem_record(room, step)

    def timeline(self) -> list[tuple[float, int, str]]:
        """Seconds, bytes above the start, and phase of every recorded change."""
        seconds = ctypes.c_double()
        live = ctypes.c_int64()
        phase = ctypes.c_int()
        events = []
        for i in range(self._library.cpumem_events()):
            self._library.cpumem_event(i, *map(ctypes.byref, (seconds, live, phase)))
            events.append((seconds.value, live.value - self.start, PHASES[phase.value]))
        return events

    def watch(self, step: int = 100_000) -> Operations:
        """Remember the largest blocks at the peak and the operations that made them."""
        self._library.cpumem_watch(step)
        return Operations(self._library)


class Operations(TorchDispatchMode):
    """Tells the counting library which operation runs, so that memory blocks have a name."""

    def __init__(self, library: ctypes.CDLL):
        super().__init__()
        self._library = library
        self._names: dict[str, int] = {"(before training)": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation under its name and the shape of its first large argument."""
        shapes = [tuple(a.shape) for a in args if isinstance(a, torch.Tensor) and a.numel() > 4096]
        name = f"{func} {list(shapes[0])}" if shapes else str(func)
        self._library.cpumem_operation(self._names.setdefault(name, len(self._names)))
        return func(*args, **(kwargs or {}))

    def blocks(self) -> list[dict[str, Any]]:
        """The largest blocks alive at the peak: bytes, phase and operation that made them."""
        size = ctypes.c_int64()
        phase = ctypes.c_int()
        operation = ctypes.c_int()
        names = list(self._names)
        blocks = []
        for i in range(self._library.cpumem_largest()):
            self._library.cpumem_block(i, *map(ctypes.byref, (size, phase, operation)))
            made_by = {"phase": PHASES[phase.value], "operation": names[operation.value]}
            blocks.append({"bytes": size.value, **made_by})
        return blocks


class CudaBytes:
    """Bytes that torch allocates on the current GPU."""

    def reset(self) -> None:
        """Reset all peaks to what is held now."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.start = torch.cuda.memory_allocated()
        self._phase = "other"
        self._peaks: dict[str, int] = {}
        self._reserved = 0

    def enter(self, phase: str) -> None:
        """Close the peak of the phase that ends."""
        torch.cuda.synchronize()
        held_bytes = torch.cuda.max_memory_allocated() - self.start
        self._peaks[self._phase] = max(held_bytes, self._peaks.get(self._phase, 0))
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()
        self._phase = phase

    def peak(self) -> int:
        """Return the peak bytes above the start."""
        return max(self.phase_peaks().values())

    def scratch(self) -> int:
        """Return the peak bytes reserved on the device."""
        self.enter(self._phase)
        return self._reserved

    def phase_peaks(self) -> dict[str, int]:
        """Return the peak bytes above the start, by phase."""
        self.enter(self._phase)
        return self._peaks


class Meter:
    """Labels phases, and counts seconds, tokens and forward passes of each.

    Args:
        memory (`CpuBytes` or `CudaBytes`): told of every change of phase.
    """

    def __init__(self, memory: CpuBytes | CudaBytes):
        self.memory = memory
        self._depth = self._generating = 0
        self._backward = False
        self._phase = "other"

    def start(self) -> None:
        """Reset all counts and start measuring."""
        self.memory.reset()
        self.memory.enter(self._phase)
        self.wall, self.cpu, self.tokens, self.passes = (defaultdict(float) for _ in range(4))
        self._wall = time.perf_counter()
        self._cpu = time.process_time()

    def enter(self, phase: str) -> None:
        """Start a phase."""
        self.memory.enter(phase)
        wall = time.perf_counter()
        cpu = time.process_time()
        self.wall[self._phase] += wall - self._wall
        self.cpu[self._phase] += cpu - self._cpu
        self._wall = wall
        self._cpu = cpu
        self._phase = phase

    def totals(self) -> dict[str, dict[str, float]]:
        """Return what was counted since the start, by phase."""
        self.enter(self._phase)
        counted = {"seconds": self.wall, "cpu_seconds": self.cpu, "tokens": self.tokens}
        return {name: dict(values) for name, values in (counted | {"passes": self.passes}).items()}

    def install(self) -> None:
        """Watch transformers, autograd and the optimizers of this process."""
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )
        from transformers import PreTrainedModel
        from transformers.generation.utils import GenerationMixin

        self.watch_generation(GenerationMixin)
        PreTrainedModel.__call__ = self._counted(PreTrainedModel.__call__)
        torch.autograd.backward = self._as_backward(torch.autograd.backward)
        register_optimizer_step_pre_hook(lambda *_: self.enter("optimizer"))
        register_optimizer_step_post_hook(lambda *_: self.enter("other"))

    def watch_generation(self, owner: type) -> None:
        """Count everything inside `owner.generate` as generation."""
        function = owner.generate

        @functools.wraps(function)
        def generate(*args: Any, **kwargs: Any) -> Any:
            self.enter("generation")
            self._generating += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._generating -= 1
                self.enter("generation" if self._generating else "other")

        owner.generate = generate

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                self._count(kwargs, args)
            self._depth += 1
            try:
                return function(model, *args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def _count(self, kwargs: dict[str, Any], args: tuple[Any, ...]) -> None:
        phase = self._phase_of_pass(kwargs)
        if phase != self._phase:
            self.enter(phase)
        ids = kwargs.get("input_ids", args[0] if args else None)
        embeds = kwargs.get("inputs_embeds")
        tokens = ids.numel() if ids is not None else embeds.shape[0] * embeds.shape[1]
        self.tokens[phase] += tokens
        self.passes[phase] += 1

    def _phase_of_pass(self, kwargs: dict[str, Any]) -> str:
        if self._backward:
            return "backward"
        if self._generating:
            return "generation"
        return "forward" if torch.is_grad_enabled() else "scoring"

    def _as_backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._backward:
                return function(*args, **kwargs)
            self.enter("backward")
            self._backward = True
            try:
                return function(*args, **kwargs)
            finally:
                self._backward = False
                self.enter("other")

        return backward


def thin(events: list[tuple[float, int, str]], points: int = POINTS) -> list[list[Any]]:
    """Keep about `points` events, the highest of each stretch: seconds, bytes, phase."""
    if not events:
        return []
    first = events[0][0]
    last = events[-1][0]
    width = max((last - first) / points, 1e-9)
    highest: dict[tuple[int, str], tuple[float, int, str]] = {}
    for event in events:
        key = (int((event[0] - first) / width), event[2])
        if key not in highest or event[1] > highest[key][1]:
            highest[key] = event
    return [[round(t - first, 4), b, phase] for t, b, phase in sorted(highest.values())]
