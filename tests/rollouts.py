"""Small rollouts for tests of single stages."""

import torch
from torch import Tensor

from trl.models.packed_row import Packing
from trl.types import Rollout, prefixes_of


def small_rollout(rows: list[int]) -> Rollout:
    """Rows of two completion tokens each."""
    return Rollout(
        prefixes=prefixes_of([[5]] * len(rows)),
        completion_ids=[[6, 7]] * len(rows),
        row_ids=rows,
        loss_mask=torch.ones(len(rows), 2, dtype=torch.bool),
        num_loss_tokens=torch.tensor(2 * len(rows)),
        num_loss_rows=torch.tensor(len(rows)),
    )


def rollout_of(rows: list[tuple[list[int], list[int]]]) -> Rollout:
    """Rows of prompt and completion ids, all of whose tokens are trained on."""
    lengths = torch.tensor([len(ids) for _, ids in rows])
    return Rollout(
        prefixes=prefixes_of([prompt for prompt, _ in rows]),
        completion_ids=[ids for _, ids in rows],
        row_ids=list(range(len(rows))),
        loss_mask=torch.arange(int(lengths.max())) < lengths[:, None],
        num_loss_tokens=lengths.sum(),
        num_loss_rows=torch.tensor(len(rows)),
    )


def visible(packing: Packing, total: int) -> Tensor:
    """The mask (T, T) that a packing stands for in layers without a window: True is seen."""
    mask = torch.zeros(total, total, dtype=torch.bool)
    for group in packing.groups:
        mask[group.all_tails, group.prefix] = True
        mask[group.prefix, group.prefix] = True
        for start, stop in group.tails:
            mask[start:stop, start:stop] = True
    return mask.tril()
