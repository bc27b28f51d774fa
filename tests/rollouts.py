"""Small rollouts for tests of single stages."""

import torch

from trl.types import Rollout


def small_rollout(rows: list[int]) -> Rollout:
    """Rows of two completion tokens each."""
    return Rollout(
        prompt_ids=[[5]] * len(rows),
        completion_ids=[[6, 7]] * len(rows),
        row_ids=rows,
        loss_mask=torch.ones(len(rows), 2, dtype=torch.bool),
        num_loss_tokens=torch.tensor(2 * len(rows)),
        num_loss_rows=torch.tensor(len(rows)),
    )
