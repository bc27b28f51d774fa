"""The phases of a training step: their memory is measured, and their pieces made to fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from ...distributed import Ranks
from ...memory.adaptive_batch import AdaptiveBatch
from ...memory.meter import PhaseMeter
from ...memory.probes import release_cached_blocks
from ...online.metrics import MetricStore
from ...progress import begin
from ...random_numbers import RandomState
from ...types import Rollout
from ..online.online_config import OnlineConfig


class Phases:
    """Wraps what a step does in its phases.

    Args:
        args (`OnlineConfig`): `log_memory`, `empty_cache`, `recover_from_oom`,
            `ds3_gather_for_generation`.
        ranks (`Ranks`): all processes.
        store (`MetricStore`): where peaks go.

    Attributes:
        layers_are_shared (`bool`): whether generation gathers the weights of one layer at a time.
    """

    def __init__(self, args: OnlineConfig, ranks: Ranks, store: MetricStore):
        fixed = not args.recover_from_oom
        self.layers_are_shared = ranks.share_weights and not args.ds3_gather_for_generation
        self.meter = PhaseMeter(args.device, enabled=args.log_memory)
        # A process cannot go back alone while others wait for its part of the weights, or for the
        # gradient of a failed pass.
        self.generation = AdaptiveBatch("generation", disabled=fixed or self.layers_are_shared)
        self.scoring = AdaptiveBatch("scoring", disabled=fixed or ranks.share_weights)
        self.rewards = AdaptiveBatch(
            "rewards", disabled=fixed
        )  # of reward models, whole on each rank
        self.training = AdaptiveBatch("training", disabled=fixed or ranks.count > 1)
        self._store = store
        self._empty_cache = args.empty_cache
        self._device = args.device
        self._done: list[Rollout] = []  # micro-batches since the last update
        self._random: RandomState | None = None

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Measure a phase."""
        begin(name)
        return self.meter.phase(name)

    @contextmanager
    def inference(self, name: str, rows: int = 0) -> Iterator[None]:
        """Measure a phase after which cached blocks may go back to the device."""
        begin(name, rows)
        with self.meter.phase(name):
            yield
        release_cached_blocks(self._empty_cache, self._device)

    def train(
        self, batch: Rollout, step: Callable[[Rollout], Tensor], undo: Callable[[], None]
    ) -> Tensor:
        """Run forward and backward on a micro-batch, in pieces if it does not fit.

        A failed backward pass leaves gradients half added. So after running out of memory all
        gradients are dropped, and the update begins anew with its first micro-batch.

        Args:
            batch (`Rollout`): the next micro-batch of the update.
            step: forward and backward of some of its rows; returns the loss.
            undo: forgets the gradients of the update, and what else its steps left.

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
            undo()
            self._store.restore(metrics)
            if self._random is not None:
                self._random.restore()

        total = earlier + len(batch)
        return torch.stack(self.training.retry_all(total, reset, work, start=earlier)).sum()

    def _located(self, rows: range) -> Iterator[tuple[Rollout, Rollout]]:
        """Each micro-batch of the update that has some of the rows, and those rows."""
        first = 0
        for micro_batch in self._done:
            start, stop = max(rows.start - first, 0), min(rows.stop - first, len(micro_batch))
            if start < stop:
                yield micro_batch, micro_batch.select(range(start, stop))
            first += len(micro_batch)

    def begin_update(self) -> None:
        """Forget the micro-batches of an update that was not finished."""
        self._done.clear()

    def end_update(self) -> None:
        """Forget the micro-batches of the update, and record the peaks of its phases."""
        self._done.clear()
        for name, value in self.meter.take().items():
            self._store.maximum(name, torch.tensor(value))
