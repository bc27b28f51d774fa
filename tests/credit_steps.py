"""Rollout batches for tests of algorithms, and what these record."""

from collections.abc import Sequence
from typing import Any

import torch

from trl.batch import Batch, Branch, Group, Step, with_totals
from trl.distributed import Ranks
from trl.online.metrics import MetricStore
from trl.types import Prefix, RewardTable


def credit_step(
    lengths: Sequence[int],
    rewards: Sequence[float],
    group_size: int,
    table: RewardTable | None = None,
    **columns: Any,
) -> Step:
    """A rollout batch of one rank before credit: completions of these lengths, all in the loss."""
    if table is None:
        total = torch.tensor(rewards)
        table = RewardTable(
            per_function=total[:, None],
            weights=torch.ones(1),
            total=total,
            names=("reward",),
            group_size=group_size,
        )
    groups = []
    for number in range(len(lengths) // group_size):
        sizes = lengths[number * group_size : (number + 1) * group_size]
        branches = tuple(Branch(range(10, 10 + size), [True] * size) for size in sizes)
        groups.append(Group(Prefix([number + 1]), branches, row=number))
    batch = Batch.of(groups).with_columns(**columns)
    return Step(batches=[batch], ranks=Ranks(), table=table)


def micro_batches(step: Step, count: int = 1) -> list[Batch]:
    """The micro-batches of an optimizer step that the rollout batch of a step is cut into."""
    return with_totals(step.batch.split(count), step.ranks)


def noise(seed: int, rows: int, columns: int, scale: float = 0.3) -> torch.Tensor:
    """Normal numbers in double precision."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def recorded(metrics: MetricStore) -> dict[str, float | None]:
    """What an algorithm recorded."""
    return metrics.flush(lambda state: [state])
