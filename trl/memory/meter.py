"""Measure the peak memory of each phase of a training step, and the memory in use at a moment."""

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Self

import psutil
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..ops.torch_internals import is_wrapper_subclass
from ..suggestions import did_you_mean

PHASES = ("generation", "scoring", "rewards", "forward", "backward", "optimizer")
GB = 1e9
_AT_THE_END = ("fragmentation", "tensors")  # figures of the end of a phase; the others are peaks

THRESHOLD = 0.25  # "auto" frees cached blocks if they are this fraction of reserved memory,
FLOOR = 256 * 2**20  # and this many bytes: freeing waits for the device

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")

# Returns figures in bytes since the last call; `fragmentation` is a fraction. Figures that cannot
# be measured on this machine are left out.
Probe = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class PhaseEvent:
    """A phase that has ended."""

    phase: str  # one of `PHASES`
    start: float  # seconds since the meter was made
    end: float  # after all phases inside it
    figures: dict[str, float]  # bytes by name, without the phases inside it; see `PhaseMeter`

    def readable(self) -> dict[str, float]:
        """Return the figures in GB (10^9 bytes) as `peak_gb` and so on, and `fragmentation`."""
        figures = dict(self.figures)
        fragmentation = figures.pop("fragmentation", None)
        readable = {f"{name}_gb": value / GB for name, value in figures.items()}
        if fragmentation is not None:
            readable["fragmentation"] = fragmentation
        return readable


class PhaseMeter:
    """Measures the memory of phases; each boundary takes less than a tenth of a millisecond.

    Phases may be nested. What happens in an inner phase is not counted for the outer one, which
    continues after it.

    On a CUDA device the figures are `cuda_figures`; elsewhere those of `ProcessProbe` and
    `HeapProbe`. `tensors` is a probe that replaces `HeapProbe`, or adds to `cuda_figures`. The peak
    counters of the device or the kernel are reset at each boundary. Measuring does not change
    random numbers or results.

    Functions in `on_phase_end` are called with the `PhaseEvent` of each phase that ends. `peak` is
    the largest peak so far in bytes, inside or between phases.
    """

    def __init__(
        self, device: torch.device | str, enabled: bool = True, tensors: Probe | None = None
    ):
        self.enabled = enabled
        self.on_phase_end: list[Callable[[PhaseEvent], None]] = []
        self.peak = 0.0
        self._probes: list[Probe] = []
        if enabled and torch.device(device).type == "cuda":
            self._probes = [partial(cuda_figures, torch.device(device)), *filter(None, [tensors])]
        elif enabled:
            self._probes = [ProcessProbe(), tensors or HeapProbe()]
        self._open: list[PhaseEvent] = []  # phases without end yet, the innermost last
        self._metrics: dict[str, float] = {}
        self._created = time.perf_counter()
        for probe in self._probes[:1]:  # reset the peak; the probe of tensors starts with a phase
            probe()

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Measure one of `PHASES` in a block; phases left open inside end with it."""
        if phase not in PHASES:
            hint = did_you_mean(phase, PHASES, f" It must be one of {', '.join(PHASES)}.")
            raise ValueError(f"phase={phase!r} is unknown.{hint}")
        if not self.enabled:
            yield
            return
        depth = len(self._open)
        self._boundary()
        self._open.append(PhaseEvent(phase, time.perf_counter() - self._created, 0.0, {}))
        try:
            yield
        finally:
            while len(self._open) > depth:
                self._boundary()
                event = replace(self._open.pop(), end=time.perf_counter() - self._created)
                merge_peaks(self._metrics, event)
                for listener in self.on_phase_end:
                    listener(event)

    def take(self) -> dict[str, float]:
        """Return the largest figures of each phase that ended since the last call.

        They are `memory/<phase>/peak_gb`, `reserved_gb`, `tensors_gb` and `fragmentation`.
        """
        metrics = self._metrics
        self._metrics = {}
        return metrics

    def _boundary(self) -> None:
        """Add the figures since the last boundary to the innermost phase."""
        figures: dict[str, float] = {}
        for probe in self._probes:
            figures |= probe()
        self.peak = max(self.peak, figures.get("peak", 0.0))
        if not self._open:
            return
        totals = self._open[-1].figures
        for name, value in figures.items():
            totals[name] = value if name in _AT_THE_END else max(totals.get(name, value), value)


def merge_peaks(metrics: dict[str, float], event: PhaseEvent) -> None:
    """Update `metrics`, named as by `PhaseMeter.take`, with the figures of `event` if larger."""
    for name, value in event.readable().items():
        key = f"memory/{event.phase}/{name}"
        metrics[key] = max(metrics.get(key, value), value)


def cuda_figures(device: torch.device) -> dict[str, float]:
    """Peak allocated and reserved bytes of a CUDA device since the last call, without a sync.

    `fragmentation` is the fraction of reserved memory that no tensor uses now.
    """
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    if not stats:
        return {}
    torch.cuda.reset_peak_memory_stats(device)
    allocated = stats["allocated_bytes"]["all"]
    reserved = stats["reserved_bytes"]["all"]
    unused = reserved["current"] - allocated["current"]
    return {
        "peak": allocated["peak"],
        "reserved": reserved["peak"],
        "fragmentation": unused / max(reserved["current"], 1),
    }


def release_cached_blocks(policy: str, device: torch.device | str) -> None:
    """Free cached blocks of a CUDA device: "always" (arXiv 2410.15651), "never" or "auto"."""
    if torch.device(device).type != "cuda" or policy == "never":
        return
    reserved = torch.cuda.memory_reserved(device)
    unused = reserved - torch.cuda.memory_allocated(device)
    minimum = 1 if policy == "always" else FLOOR
    fraction = 0.0 if policy == "always" else THRESHOLD
    if unused >= minimum and unused > fraction * reserved:
        torch.cuda.empty_cache()


def device_bytes(device: torch.device) -> float:
    """Total memory of a GPU, or of the machine for a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(psutil.virtual_memory().total)


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device that is free, and that this process uses, in bytes."""

    free: float  # what this process can still allocate, its empty cached blocks included
    used: float  # what its tensors take

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """Measure a GPU, or the machine for a CPU."""
        if device.type == "cuda":
            allocated = torch.cuda.memory_allocated(device)
            cached = torch.cuda.memory_reserved(device) - allocated
            return cls(float(torch.cuda.mem_get_info(device)[0] + cached), float(allocated))
        return cls(float(psutil.virtual_memory().available), float(visible_tensor_bytes()))


class ProcessProbe:
    """Peak resident memory of this process on Linux: the kernel's high-water mark.

    Each call resets the mark, so `/usr/bin/time` reports only the peak since the last call. If the
    mark cannot be reset, the peak is the larger of the sizes at the last call and now, which misses
    what was freed in between.
    """

    def __init__(self) -> None:
        self._before = _bytes_of("VmRSS")
        self.is_exact = self._before is not None and _reset_high_water()

    def __call__(self) -> dict[str, float]:
        mark = _bytes_of("VmHWM" if self.is_exact else "VmRSS")
        if mark is None or self._before is None:
            return {}
        if self.is_exact:
            _reset_high_water()
            return {"peak": mark}
        peak = max(self._before, mark)
        self._before = mark
        return {"peak": peak}


def _bytes_of(field: str) -> int | None:
    """Return a field of /proc/self/status in bytes; None if there is none."""
    try:
        text = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    _, separator, rest = text.partition(f"{field}:")
    return int(rest.split(maxsplit=1)[0]) * 1024 if separator else None


def _reset_high_water() -> bool:
    with suppress(OSError):
        _CLEAR_REFS.write_text("5", encoding="ascii")
        return True
    return False


class _HeapAccount(ctypes.Structure):
    _names = "arena ordblks smblks hblks mapped usmblks fsmblks used fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _heap_in_use() -> int:
    """Bytes that the C library has allocated; raises an error if it is not glibc."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _HeapAccount
    account = mallinfo()
    return int(account.used + account.mapped)


class HeapProbe:
    """Bytes of live CPU tensors: those found at the first call, and glibc's allocations since."""

    @cached_property
    def _not_tensors(self) -> int | None:
        """Bytes of the heap that are not tensors; None if the heap does not show a new tensor."""
        try:
            before = _heap_in_use()
            sample = torch.empty(1 << 24, dtype=torch.uint8, device="cpu")
            after = _heap_in_use()
        except (AttributeError, OSError, TypeError):
            return None
        is_visible = abs(after - before - sample.nbytes) < sample.nbytes // 4
        return after - visible_tensor_bytes() if is_visible else None

    def __call__(self) -> dict[str, float]:
        not_tensors = self._not_tensors
        return {} if not_tensors is None else {"tensors": max(_heap_in_use() - not_tensors, 0)}


def visible_tensor_bytes() -> int:
    """Return the bytes of the storages of all CPU tensors that Python objects refer to."""
    sizes: dict[int, int] = {}
    # `isinstance` would read `__class__` of every object, which imports lazy modules.
    objects = gc.get_objects()
    tensor_classes = {cls for cls in set(map(type, objects)) if issubclass(cls, Tensor)}
    for tensor in objects:
        if type(tensor) not in tensor_classes:
            continue
        storage = storage_of(tensor)
        if storage is not None and storage.device.type == "cpu":
            sizes[StorageWeakRef(storage).cdata] = storage.nbytes()
    return sum(sizes.values())


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None if it has none, or is a wrapper of other tensors."""
    with suppress(RuntimeError, ValueError):  # sparse, or not initialized yet
        if not is_wrapper_subclass(tensor) and tensor.device.type != "meta":
            return tensor.untyped_storage()
    return None
