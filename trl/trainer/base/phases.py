"""The phases of a training step: their memory is measured, and their batches made to fit."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from ...memory.adaptive_batch import AdaptiveBatch
from ...memory.meter import PhaseMeter, release_cached_blocks
from ...online.metrics import MetricStore
from ...progress import begin
from .base_config import BaseConfig


class Phases:
    """Measures the phases of a training step; their peaks of memory go to `store`."""

    def __init__(self, args: BaseConfig, store: MetricStore):
        self.meter = PhaseMeter(args.device, enabled=args.log_memory)
        self.batches: dict[str, AdaptiveBatch] = {}  # how many rows each works on at once
        self._args = args
        self._store = store
        self._started = 0.0

    def __call__(self, name: str, rows: int = 0) -> AbstractContextManager[None]:
        """Measure a phase, of this many rows where that is known."""
        begin(name, rows)
        return self.meter.phase(name)

    def adaptive(self, name: str, alone: bool = False) -> AdaptiveBatch:
        """Add a phase whose rows can be cut, unless a process would go back `alone`."""
        self.batches[name] = AdaptiveBatch(name, disabled=alone or not self._args.recover_from_oom)
        return self.batches[name]

    @contextmanager
    def inference(self, name: str, rows: int = 0) -> Iterator[None]:
        """Measure a phase after which cached blocks may go back to the device."""
        with self(name, rows):
            yield
        release_cached_blocks(self._args.empty_cache, self._args.device)

    def begin_update(self) -> None:
        """Start the clock of an update."""
        self._started = time.perf_counter()

    def end_update(self) -> None:
        """Record the time of an update, and its peaks of memory."""
        # Devices work behind: looking at the gradient's norm has waited for all of the backward.
        self._store.value("step_time", time.perf_counter() - self._started)
        for name, value in self.meter.take().items():
            self._store.maximum(name, torch.tensor(value))
