"""The few collectives a training step needs, over accelerate."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor


class Ranks:
    """Gathers per-row values and Python objects over all processes.

    Args:
        accelerator (`Accelerator`): the trainer's accelerator.
    """

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator
        self.rank: int = accelerator.process_index
        self.count: int = accelerator.num_processes

    def gather(self, rows: Tensor) -> Tensor:
        """Concatenate per-row values (B, ...) of all ranks in rank order: (N, ...)."""
        if self.count == 1:
            return rows
        return self._accelerator.gather(rows.to(self._accelerator.device).contiguous())

    def sum(self, value: Tensor) -> Tensor:
        """Add a tensor up over all ranks."""
        if self.count == 1:
            return value
        return self._accelerator.reduce(value.to(self._accelerator.device), reduction="sum")

    def gather_objects(self, value: Any) -> list[Any]:
        """Return one picklable object from each rank, in rank order, on every rank."""
        return [value] if self.count == 1 else gather_object([value])

    def local(self, rows: Tensor) -> Tensor:
        """Return this rank's share (B, ...) of gathered rows (N, ...)."""
        size = rows.shape[0] // self.count
        return rows[self.rank * size : (self.rank + 1) * size]
