"""The phases of a training step: their memory is measured, and their batches made to fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...distributed import Ranks
from ...memory.adaptive_batch import AdaptiveBatch
from ...memory.meter import PhaseMeter
from ...memory.probes import release_cached_blocks
from ...online.metrics import MetricStore
from ...progress import begin
from ...random_numbers import RandomState
from ...types import Rows
from .base_config import BaseConfig

AnyRows = TypeVar("AnyRows", bound=Rows)


class Phases:
    """Wraps what a step does in its phases.

    Args:
        args (`BaseConfig`): `log_memory`, `empty_cache`, `recover_from_oom`.
        ranks (`Ranks`): all processes.
        store (`MetricStore`): where peaks go.

    Attributes:
        batches (`dict[str, AdaptiveBatch]`): how many rows each phase works on at once.
    """

    def __init__(self, args: BaseConfig, ranks: Ranks, store: MetricStore):
        self.meter = PhaseMeter(args.device, enabled=args.log_memory)
        self.batches: dict[str, AdaptiveBatch] = {}
        self._fixed = not args.recover_from_oom
        # A process cannot go back alone while others wait for the gradient of a failed pass.
        self._training = self.adaptive("training", alone=ranks.count > 1)
        self._training.unit = args.unit
        self._store = store
        self._empty_cache = args.empty_cache
        self._device = args.device
        self._forgets: list[Callable[[], None]] = []
        self._done: list[Rows] = []  # micro-batches since the last update
        self._random: RandomState | None = None

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Measure a phase."""
        begin(name)
        return self.meter.phase(name)

    def adaptive(self, name: str, alone: bool = False) -> AdaptiveBatch:
        """Add a phase whose rows can be cut.

        Args:
            alone (`bool`): whether a failed process would go back alone while others wait for it,
                so that it must not.
        """
        self.batches[name] = AdaptiveBatch(name, disabled=self._fixed or alone)
        return self.batches[name]

    @contextmanager
    def inference(self, name: str, rows: int = 0) -> Iterator[None]:
        """Measure a phase after which cached blocks may go back to the device."""
        begin(name, rows)
        with self.meter.phase(name):
            yield
        release_cached_blocks(self._empty_cache, self._device)

    # --- Training ---

    def on_forget(self, forget: Callable[[], None]) -> None:
        """Register what drops something that the micro-batches of an update leave behind."""
        self._forgets.append(forget)

    def train(self, batch: AnyRows, step: Callable[[AnyRows], Tensor]) -> Tensor:
        """Run forward and backward on a micro-batch, in pieces if it does not fit.

        A failed backward pass leaves gradients half added. So after running out of memory all
        gradients are dropped, and the update begins anew with its first micro-batch.

        Args:
            batch (`Rows`): the next micro-batch of the update.
            step: forward and backward of some of its rows; returns the loss.

        Returns:
            `Tensor` (): the loss of `batch`.
        """
        if not self._done:
            self._random = RandomState()
        earlier = sum(map(len, self._done))
        self._done.append(batch)
        metrics = self._store.copy()

        def work(rows: range) -> Tensor:
            loss = torch.zeros((), device=self._device)
            for micro_batch, part in self._located(rows):
                known = self._store.copy()
                begin("backward")
                with self.meter.phase("backward"):  # `step` measures its forward within it
                    value = step(micro_batch if len(part) == len(micro_batch) else part)
                if micro_batch is batch:
                    loss += value
                else:  # its metrics were recorded at the first time
                    self._store.restore(known)
            return loss

        def reset() -> None:
            self._forget()
            self._store.restore(metrics)
            if self._random is not None:
                self._random.restore()

        total = earlier + len(batch)
        return torch.stack(self._training.retry_all(total, reset, work, start=earlier)).sum()

    def _located(self, rows: range) -> Iterator[tuple[Any, Any]]:
        """Each micro-batch of the update that has some of the rows, and those rows."""
        first = 0
        for micro_batch in self._done:
            start, stop = max(rows.start - first, 0), min(rows.stop - first, len(micro_batch))
            if start < stop:
                yield micro_batch, micro_batch.select(range(start, stop))
            first += len(micro_batch)

    def _forget(self) -> None:
        for forget in self._forgets:
            forget()

    def begin_update(self) -> None:
        """Drop the micro-batches of an update that an error interrupted."""
        self._done.clear()

    def drop_update(self) -> None:
        """Drop the micro-batches of an update that is not finished, and what they left."""
        self._forget()
        self._done.clear()

    def end_update(self) -> None:
        """Let go of the micro-batches of the update, and record the peaks of its phases."""
        self._done.clear()
        for name, value in self.meter.take().items():
            self._store.maximum(name, torch.tensor(value))
