"""The rollout of the current round, cut into the micro-batches that train on it."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..types import Rollout, prefixes_of


class Buffer:
    """Serves the micro-batches that a round is cut into, in the same order on every pass."""

    def __init__(self, micro_batches: int, passes: int):
        self._micro_batches = micro_batches
        self._period = micro_batches * passes
        self.clear()

    def clear(self) -> None:
        """Hold nothing."""
        self._round: int | None = None
        self._chunks: list[Rollout] = []

    def is_stale(self, step: int) -> bool:
        """Whether micro-step `step` belongs to another round than the one held."""
        return self._round != step // self._period

    def fill(self, step: int, rollout: Rollout) -> None:
        """Hold the rollout of the round that micro-step `step` belongs to."""
        self._round = step // self._period
        self._chunks = list(rollout.chunks(self._micro_batches))

    def at(self, step: int) -> Rollout:
        """Return the micro-batch that micro-step `step`, which must be of this round, trains on."""
        if self.is_stale(step):
            raise RuntimeError(f"The buffer does not hold the round of micro-step {step}.")
        return self._chunks[step % self._micro_batches]

    def longest(self) -> Rollout:
        """Return the micro-batch with the longest row."""
        return max(self._chunks, key=lambda rollout: max(rollout.lengths))

    def state(self, step: int) -> list[dict[str, Any]] | None:
        """The fields of the micro-batches that `step` needs; None if it begins a round.

        Checkpoints hold tensors, numbers, and lists of these, so prefixes are lists of ids.
        """
        if self.is_stale(step):
            return None
        states = []
        for micro_batch in self._chunks:
            names = [field.name for field in dataclasses.fields(Rollout)]
            state = {name: getattr(micro_batch, name) for name in names}
            state["prefixes"] = [list(prefix.ids) for prefix in micro_batch.prefixes]
            states.append(state)
        return states

    def restore(self, step: int, state: list[dict[str, Any]] | None, device: torch.device) -> None:
        """Hold what `state` returned when micro-step `step` was the next one."""
        self.clear()
        # A loop that was told to skip no consumed rows is at another place of its round.
        if state is not None and step % self._period:
            self._round = step // self._period
            self._chunks = [_restored(fields, device) for fields in state]


def _restored(fields: dict[str, Any], device: torch.device) -> Rollout:
    """Make the micro-batch whose fields `Buffer.state` returned."""
    on_device = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in fields.items()
    }
    return Rollout(**on_device | {"prefixes": prefixes_of(fields["prefixes"])})
