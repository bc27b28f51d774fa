"""Every byte of live tensors, exactly: what memory is compared with in tests and benchmarks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl.memory.meter import storage_of


class TensorBytes(TorchDispatchMode):
    """Counts the storages of all tensors made while it is entered, until each is freed.

    Tensors that only autograd holds count; views count once; scratch memory inside one operator
    does not count. Every operator takes some microseconds longer. `boundary` is a probe of
    `PhaseMeter`.

    Args:
        existing: tensors made before, to count as well.

    Attributes:
        live (`int`): bytes now.
        peak (`int`): most bytes at once since it was made, or since the last `boundary`.
    """

    def __init__(self, existing: Iterable[Tensor] = ()):
        super().__init__()
        self.live = 0
        self.peak = 0
        self._storages: dict[int, tuple[Any, int]] = {}  # address -> weak reference, bytes
        for tensor in existing:
            self.add(tensor)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator and count what it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor from now until it is freed, at its present size."""
        storage = storage_of(tensor)
        if storage is None:
            return
        address, size = storage._cdata, storage.nbytes()
        reference, known = self._storages.get(address, (None, 0))
        if reference is None:
            reference = weakref.ref(storage, lambda _: self._forget(address))
        self._storages[address] = (reference, size)
        self.live += size - known
        self.peak = max(self.peak, self.live)

    def boundary(self) -> dict[str, float]:
        """Return `tensors` (bytes now) and `tensors_peak`, and begin the next stretch."""
        figures = {"tensors": float(self.live), "tensors_peak": float(self.peak)}
        self.peak = self.live
        return figures

    def _forget(self, address: int) -> None:
        self.live -= self._storages.pop(address)[1]
