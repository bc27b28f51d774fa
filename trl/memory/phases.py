"""The phases of a training step: their memory is measured, and their batches made to fit."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from .adaptive_batch import AdaptiveBatch
from .meter import PhaseMeter, release_cached_blocks
from .options import MemoryOptions
from .progress import begin


class Phases:
    """Measures the phases of training steps, and knows how many rows each works on at once."""

    def __init__(self, options: MemoryOptions, device: torch.device):
        self.meter = PhaseMeter(device, enabled=options.log_memory)
        self.batches: dict[str, AdaptiveBatch] = {}  # how many rows each works on at once
        self._options = options
        self._device = device
        self._started = 0.0

    def __call__(self, name: str, rows: int = 0) -> AbstractContextManager[None]:
        """Measure a phase, of this many rows where that is known."""
        begin(name, rows)
        return self.meter.phase(name)

    def adaptive(self, name: str, alone: bool = False) -> AdaptiveBatch:
        """Add a phase whose rows can be cut, unless a process would go back `alone`."""
        is_disabled = alone or not self._options.recover_from_oom
        self.batches[name] = AdaptiveBatch(name, disabled=is_disabled)
        return self.batches[name]

    @contextmanager
    def inference(self, name: str, rows: int = 0) -> Iterator[None]:
        """Measure a phase after which cached blocks may go back to the device."""
        with self(name, rows):
            yield
        release_cached_blocks(self._options.empty_cache, self._device)

    def begin_update(self) -> None:
        """Start the clock of an update."""
        self._started = time.perf_counter()

    def end_update(self) -> tuple[float, dict[str, float]]:
        """Return the seconds of an update, and its peaks of memory by metric.

        Devices work behind: looking at the gradient's norm has waited for all of the backward.
        """
        return time.perf_counter() - self._started, self.meter.take()
