"""Small batches for tests of algorithms, and scores of their tokens."""

import torch
from torch import Tensor

from trl.batch import Batch, Branch, Columns, Group, with_totals
from trl.distributed import Ranks
from trl.types import Prefix


def make_group(lengths, row=0, masks=None, **facts) -> Group:
    """A prompt of one token, and branches of these lengths, with all tokens in the loss."""
    masks = masks or [[True] * length for length in lengths]
    branches = tuple(
        Branch([7] * length, mask) for length, mask in zip(lengths, masks, strict=True)
    )
    return Group(Prefix([5 + row]), branches, row, **facts)


def make_batches(groups, sizes=None, mode="train", **columns) -> list[Batch]:
    """Micro-batches of an optimizer step, of so many groups each."""
    sizes = sizes or [len(groups)]
    batches, first, row = [], 0, 0
    for size in sizes:
        part = groups[first : first + size]
        rows = sum(len(group.branches) for group in part)
        own = Columns(**{name: column[row : row + rows] for name, column in columns.items()})
        batches.append(Batch.of(part, own, mode, keeps_groups=True))
        first, row = first + size, row + rows
    return with_totals(batches, Ranks())


def token_values(batch: Batch, seed: int = 0, low: float = -3.0, high: float = 0.0) -> Tensor:
    """Values (B, C) of tokens between two bounds; 0 beyond the end of a branch."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(batch.loss_mask.shape, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([len(ids) for ids in batch.rows.completion_ids])
    exists = torch.arange(values.shape[1]) < lengths[:, None]
    return torch.where(exists, low + (high - low) * values, 0.0)


def logged(metrics) -> dict[str, float]:
    """What a store of metrics would write into the log."""
    return metrics.flush(lambda value: [value])
