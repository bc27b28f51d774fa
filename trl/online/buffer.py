"""Holds the rollout batch that is trained on, cut into micro-batches."""

from dataclasses import replace
from typing import Any

import torch

from ..batch import Batch, Branch, Columns, Group, Totals, with_totals
from ..distributed import Ranks
from ..types import Prefix


class Buffer:
    """Serves the micro-batches of a rollout batch, in the same order on every pass."""

    def __init__(self, micro_batches: int, passes: int, ranks: Ranks):
        self._count = micro_batches
        self._period = micro_batches * passes
        self._ranks = ranks
        self.clear()

    def clear(self) -> None:
        """Drop the micro-batches."""
        self._round: int | None = None
        self._micro_batches: list[Batch] = []

    def is_stale(self, step: int) -> bool:
        """Return whether micro-step `step` belongs to another rollout batch than the one held."""
        return self._round != step // self._period

    def fill(self, step: int, batch: Batch) -> None:
        """Hold the rollout batch that micro-step `step` trains on; all ranks call this."""
        self._round = step // self._period
        self._micro_batches = with_totals(batch.split(self._count), self._ranks)

    def at(self, step: int, accumulation: int) -> Batch:
        """Return the micro-batch of micro-step `step`, which must be of the rollout batch held.

        An optimizer step has `accumulation` micro-batches, so its totals are those of the rollout
        batch times `accumulation` over the number of micro-batches.
        """
        if self.is_stale(step):
            raise RuntimeError(f"The buffer does not hold the round of micro-step {step}.")
        batch = self._micro_batches[step % self._count]
        return replace(batch, step_totals=batch.totals.scaled(accumulation / self._count))

    def longest(self) -> Batch:
        """Return the micro-batch with the longest row."""
        return max(self._micro_batches, key=lambda batch: max(batch.rows.lengths))

    def state(self, step: int) -> list[dict[str, Any]] | None:
        """Return the micro-batches for a checkpoint; None if micro-step `step` begins a round.

        A checkpoint holds tensors, numbers, and lists and dictionaries of these.
        """
        if self.is_stale(step):
            return None
        return [_plain_values(batch) for batch in self._micro_batches]

    def restore(self, step: int, state: list[dict[str, Any]] | None, device: torch.device) -> None:
        """Hold the micro-batches that `state` returned when `step` was the next micro-step."""
        self.clear()
        # With `ignore_data_skip` the loop starts at micro-step 0, where the saved round does not
        # belong.
        if state is not None and step % self._period:
            self._round = step // self._period
            self._micro_batches = [_batch_of(values, device) for values in state]


def _plain_values(batch: Batch) -> dict[str, Any]:
    """Return the contents of a micro-batch as values that a checkpoint can hold."""
    return {
        "groups": [_group_values(group) for group in batch.groups],
        "loss_mask": batch.loss_mask,
        "columns": dict(batch.columns),
        "mode": batch.mode,
        "keeps_groups": batch.keeps_groups,
        "totals": batch.totals.stack(),
    }


def _group_values(group: Group) -> dict[str, Any]:
    return {
        "prefix": list(group.prefix.ids),
        "row": group.row,
        "branches": [
            {
                "ids": list(branch.ids),
                "loss_mask": list(branch.loss_mask),
                "row": branch.row,
                "prefix": None if branch.prefix is None else list(branch.prefix.ids),
            }
            for branch in group.branches
        ],
    }


def _batch_of(values: dict[str, Any], device: torch.device) -> Batch:
    """Make a micro-batch of the values that `_plain_values` returned."""
    batch = Batch(
        groups=tuple(_group_of(group) for group in values["groups"]),
        loss_mask=values["loss_mask"],
        columns=Columns(**values["columns"]),
        mode=values["mode"],
        keeps_groups=values["keeps_groups"],
        step_totals=Totals(*values["totals"].to(device).unbind()),
    )
    return batch.to(device)


def _group_of(values: dict[str, Any]) -> Group:
    branches = [
        Branch(
            ids=branch["ids"],
            loss_mask=branch["loss_mask"],
            row=branch["row"],
            prefix=None if branch["prefix"] is None else Prefix(branch["prefix"]),
        )
        for branch in values["branches"]
    ]
    return Group(Prefix(values["prefix"]), tuple(branches), values["row"])
