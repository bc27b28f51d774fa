"""Small rows for tests of single stages."""

import torch
from torch import Tensor

from trl.models.packed_row import Packing
from trl.types import Rows


def rollout_of(rows: list[tuple[list[int], list[int]]]) -> Rows:
    """Rows of prompt and completion ids."""
    return Rows.of(rows)


def token_mask(rows: Rows) -> Tensor:
    """Which tokens of a rectangle (B, C) there are."""
    lengths = torch.tensor([len(ids) for ids in rows.completion_ids])
    return torch.arange(int(lengths.max())) < lengths[:, None]


def visible(packing: Packing, total: int) -> Tensor:
    """The mask (T, T) that a packing stands for in layers without a window: True is seen."""
    mask = torch.zeros(total, total, dtype=torch.bool)
    for group in packing.groups:
        mask[group.all_tails, group.prefix] = True
        mask[group.prefix, group.prefix] = True
        for start, stop in group.tails:
            mask[start:stop, start:stop] = True
    return mask.tril()
