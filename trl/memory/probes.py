"""What memory a device and a process hold, cheap enough to ask at the ends of every phase."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class Probe(Protocol):
    """Measures stretches of time, one after the other without a gap."""

    def boundary(self) -> dict[str, float]:
        """Return the figures of the stretch that ends now, in bytes, and begin the next one.

        `fragmentation` is a share, not bytes. What cannot be measured here is left out.
        """


class CudaProbe:
    """Reads the caching allocator of a CUDA device, without waiting for the device.

    Figures: `peak` (allocated), `reserved` (peak), `fragmentation` (1 - allocated / reserved, now).
    Each boundary resets the allocator's own peaks (`torch.cuda.reset_peak_memory_stats`).

    Args:
        device (`torch.device`): a CUDA device.
    """

    def __init__(self, device: torch.device):
        self._device = device

    def boundary(self) -> dict[str, float]:
        """Return the figures since the last call; none before CUDA is in use."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        if not stats:
            return {}
        torch.cuda.reset_peak_memory_stats(self._device)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return {
            "peak": allocated["peak"],
            "reserved": reserved["peak"],
            "fragmentation": fragmentation(allocated["current"], reserved["current"]),
        }


def fragmentation(allocated: int, reserved: int) -> float:
    """Return the share of the `reserved` bytes that no tensor uses; 0 if none are reserved."""
    return 1.0 - allocated / reserved if reserved else 0.0


class ProcessProbe:
    """Reads the resident memory of this process from Linux.

    The figure is `peak`. Where `/proc/self/clear_refs` can be written, it is the kernel's own
    high-water mark (VmHWM) of the stretch; each boundary resets that mark, so `ru_maxrss` and
    `/usr/bin/time` then see the last stretch only. Elsewhere on Linux it is the larger of the
    resident sizes at the start and the end, which misses what was freed in between. On other
    systems there is no figure.
    """

    def __init__(self) -> None:
        self._before = _resident("VmRSS")
        self.is_exact = self._before is not None and _reset_high_water()

    def boundary(self) -> dict[str, float]:
        """Return the figure since the last call."""
        if self._before is None:
            return {}
        if self.is_exact:
            peak = _resident("VmHWM")
            _reset_high_water()
            return {} if peak is None else {"peak": peak}
        before, self._before = self._before, _resident("VmRSS") or 0
        return {"peak": max(before, self._before)}


def _resident(field: str) -> int | None:
    try:
        status = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    _, found, rest = status.partition(f"{field}:")
    return int(rest.split(maxsplit=1)[0]) * 1024 if found else None


def _reset_high_water() -> bool:
    try:
        _CLEAR_REFS.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


class HeapProbe:
    """Estimates the bytes of live CPU tensors from what the C library has handed out.

    The figure is `tensors`: the bytes of tensors that Python could see when the probe was made,
    plus what malloc has handed out since, less what was given back. So it counts tensors that only
    autograd holds, and also other native objects made since. There is no figure where tensors do
    not come from glibc (musl, macOS, a preloaded allocator). `TensorBytes` is exact.
    """

    def __init__(self) -> None:
        self._heap = _Heap.load()
        self._others = 0 if self._heap is None else self._heap.in_use() - visible_tensor_bytes()

    def boundary(self) -> dict[str, float]:
        """Return the figure of this moment."""
        if self._heap is None:
            return {}
        return {"tensors": max(self._heap.in_use() - self._others, 0)}


class _Heap:
    """The C library's account of its heap."""

    class _Account(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_size_t)
            for name in (
                *("arena", "ordblks", "smblks", "hblks", "mapped"),
                *("usmblks", "fsmblks", "used", "fordblks", "keepcost"),
            )
        ]

    def __init__(self) -> None:
        self._mallinfo = ctypes.CDLL(None).mallinfo2
        self._mallinfo.restype = self._Account

    def in_use(self) -> int:
        account = self._mallinfo()
        return account.used + account.mapped

    @classmethod
    def load(cls) -> _Heap | None:
        """Return the heap, if tensors show in its account."""
        try:
            heap = cls()
        except (AttributeError, OSError, TypeError):
            return None
        before, size = heap.in_use(), 1 << 24
        sample = torch.empty(size, dtype=torch.uint8, device="cpu")
        grown = heap.in_use() - before
        del sample
        return heap if abs(grown - size) < size // 4 else None


def visible_tensor_bytes() -> int:
    """Add up the storages of all CPU tensors that Python objects refer to: slow, 0.1 seconds."""
    sizes: dict[int, int] = {}
    for found in gc.get_objects():
        # `isinstance` would ask lazy modules for their `__class__`, and so import them.
        storage = storage_of(found) if issubclass(type(found), Tensor) else None
        if storage is not None and storage.device.type == "cpu":
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None if it only has a shape, or tensors inside it."""
    if is_traceable_wrapper_subclass(tensor):
        return None
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, ValueError):  # sparse, or not initialized yet
        return None
    return None if storage.device.type == "meta" else storage
