"""Peak memory of each phase of a training step, and what a device and a process hold."""

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

from ..suggestions import did_you_mean
from ..torch_internals import is_wrapper_subclass

PHASES = ("generation", "scoring", "rewards", "forward", "backward", "optimizer")
GB = 1e9
_AT_THE_END = ("fragmentation", "tensors")  # the other figures are peaks

THRESHOLD = 0.25  # of what is reserved
FLOOR = 256 * 2**20  # bytes worth waiting for the device and allocating again

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")

# Returns the figures of the stretch of time that ends with the call, in bytes, and begins the next
# one. `fragmentation` is a share, not bytes. What cannot be measured here is left out.
Probe = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class PhaseEvent:
    """One phase that has ended."""

    phase: str  # one of `PHASES`
    start: float  # seconds since the meter was made, phases inside it included
    end: float
    figures: dict[str, float]  # bytes by name, without the phases inside it; see `PhaseMeter`

    def readable(self) -> dict[str, float]:
        """Return the figures in GB (10^9 bytes) as `peak_gb` and so on, and `fragmentation`."""
        share = "fragmentation"
        found = {f"{name}_gb": x / GB for name, x in self.figures.items() if name != share}
        return found | {name: x for name, x in self.figures.items() if name == share}


class PhaseMeter:
    """Measures the memory of phases, cheaply: under a tenth of a millisecond at each end.

    Phases may be nested. The inner one wins: what happens within it is not counted for the outer
    one, which goes on after it.

    Figures on a CUDA device are `cuda_figures`; elsewhere those of `ProcessProbe` and `HeapProbe`,
    for which `tensors` may stand, on any device. The peaks that the device or the kernel keep are
    reset at each end of a phase. Neither random numbers nor results change.

    Functions in `on_phase_end` are called with the `PhaseEvent` of each phase that ends; `peak` is
    the largest one in bytes, in a phase or between phases.
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
        self._open: list[PhaseEvent] = []  # the innermost one last; none has its end yet
        self._metrics: dict[str, float] = {}
        self._born = time.perf_counter()
        for probe in self._probes[:1]:  # of peaks; tensors are looked for when a phase begins
            probe()

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Measure one of `PHASES` in a block; phases that are still open in it end with it."""
        if phase not in PHASES:
            hint = did_you_mean(phase, PHASES, f" It must be one of {', '.join(PHASES)}.")
            raise ValueError(f"phase={phase!r} is unknown.{hint}")
        if not self.enabled:
            yield
            return
        depth = len(self._open)
        self._boundary()
        self._open.append(PhaseEvent(phase, time.perf_counter() - self._born, 0.0, {}))
        try:
            yield
        finally:
            while len(self._open) > depth:
                self._boundary()
                event = replace(self._open.pop(), end=time.perf_counter() - self._born)
                merge_peaks(self._metrics, event)
                for listener in self.on_phase_end:
                    listener(event)

    def take(self) -> dict[str, float]:
        """Return the largest figure of each phase that ended since the last call.

        They are `memory/<phase>/peak_gb`, `reserved_gb`, `tensors_gb` and `fragmentation`.
        """
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _boundary(self) -> None:
        """Give the stretch that ends here to the innermost phase."""
        figures: dict[str, float] = {}
        for probe in self._probes:
            figures |= probe()
        self.peak = max(self.peak, figures.get("peak", 0.0))
        held = self._open[-1].figures if self._open else {}
        for name, value in figures.items():
            held[name] = value if name in _AT_THE_END else max(held.get(name, value), value)


def merge_peaks(metrics: dict[str, float], event: PhaseEvent) -> None:
    """Raise `metrics`, named as by `take`, to the figures of `event` where those are larger."""
    for name, value in event.readable().items():
        key = f"memory/{event.phase}/{name}"
        metrics[key] = max(metrics.get(key, value), value)


def cuda_figures(device: torch.device) -> dict[str, float]:
    """Peaks of what a CUDA device allocated and reserved since the last call, without waiting."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    if not stats:
        return {}
    torch.cuda.reset_peak_memory_stats(device)
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    free = reserved["current"] - allocated["current"]
    share = free / max(reserved["current"], 1)  # that no tensor uses
    return {"peak": allocated["peak"], "reserved": reserved["peak"], "fragmentation": share}


def release_cached_blocks(policy: str, device: torch.device | str) -> None:
    """Return unused blocks of a CUDA device to it: "always" (arXiv 2410.15651), "never", "auto"."""
    if torch.device(device).type == "cuda":
        reserved = torch.cuda.memory_reserved(device)
        enough = {"always": 0, "auto": max(FLOOR - 1, THRESHOLD * reserved), "never": reserved}
        if reserved - torch.cuda.memory_allocated(device) > enough[policy]:
            torch.cuda.empty_cache()


def device_bytes(device: torch.device) -> float:
    """Memory of a GPU, or of the machine for a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(psutil.virtual_memory().total)


@dataclass(frozen=True)
class DeviceMemory:
    """What a device has left at a moment, in bytes."""

    free: float  # that this process could still use, those of its empty blocks included
    held: float  # that its tensors take

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """Measure a GPU, or the machine for a CPU."""
        if device.type == "cuda":
            held = torch.cuda.memory_allocated(device)
            unused = torch.cuda.memory_reserved(device) - held
            return cls(float(torch.cuda.mem_get_info(device)[0] + unused), float(held))
        return cls(float(psutil.virtual_memory().available), float(visible_tensor_bytes()))


class ProcessProbe:
    """The peak of resident memory of this process on Linux: the kernel's high-water mark.

    Each boundary resets it, so `/usr/bin/time` sees only the last stretch. Where it cannot,
    it is the larger of the sizes at the start and the end, which misses what was freed in between.
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
        before, self._before = self._before, mark
        return {"peak": max(before, mark)}


def _bytes_of(field: str) -> int | None:
    """What Linux says of this process."""
    try:
        text = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    _, found, rest = text.partition(f"{field}:")
    return int(rest.split(maxsplit=1)[0]) * 1024 if found else None


def _reset_high_water() -> bool:
    with suppress(OSError):
        _CLEAR_REFS.write_text("5", encoding="ascii")
        return True
    return False


class _HeapAccount(ctypes.Structure):
    _names = "arena ordblks smblks hblks mapped usmblks fsmblks used fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _heap_in_use() -> int:
    """Bytes the C library has handed out; an error if it is not glibc."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _HeapAccount
    return int((account := mallinfo()).used + account.mapped)


class HeapProbe:
    """Bytes of live CPU tensors: those seen at first, and what glibc has handed out since."""

    @cached_property
    def _others(self) -> int | None:
        """Bytes of the heap that are not tensors; None if it does not show one of 16 MiB."""
        try:
            before = _heap_in_use()
            sample = torch.empty(1 << 24, dtype=torch.uint8, device="cpu")
            after = _heap_in_use()
        except (AttributeError, OSError, TypeError):
            return None
        is_shown = abs(after - before - sample.nbytes) < sample.nbytes // 4
        return after - visible_tensor_bytes() if is_shown else None

    def __call__(self) -> dict[str, float]:
        others = self._others
        return {} if others is None else {"tensors": max(_heap_in_use() - others, 0)}


def visible_tensor_bytes() -> int:
    """Add up the storages of all CPU tensors that Python objects refer to."""
    sizes: dict[int, int] = {}
    objects = gc.get_objects()  # whose class `isinstance` would ask for, importing lazy modules
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
    for storage in (storage_of(one) for one in objects if type(one) in kinds):
        if storage is not None and storage.device.type == "cpu":
            sizes[StorageWeakRef(storage).cdata] = storage.nbytes()
    return sum(sizes.values())


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None if it only has a shape, or tensors inside it."""
    with suppress(RuntimeError, ValueError):  # sparse, or not initialized yet
        if not is_wrapper_subclass(tensor) and tensor.device.type != "meta":
            return tensor.untyped_storage()
    return None
