"""A rollout batch: the groups of what was generated, and which of its rows have a gradient."""

import dataclasses
from itertools import groupby

import torch
from torch import Tensor

from ...batch import Batch, Branch, Group
from ...distributed import Ranks
from ...generation.base import Generations
from ...ops.masking import masked_mean, pad_ragged
from ...types import Prompts, RewardTable


def rollout_batch(
    prompts: Prompts,
    generations: Generations,
    first_row: int,
    group_size: int,
    masks_truncated: bool = False,
) -> Batch:
    """Make a batch of a rank's completions, grouped by prompt, on the CPU.

    Its first and last group lack the completions that other ranks have. Tokens that the policy did
    not write are not in the loss; with `masks_truncated`, those of truncated completions are not
    either. `first_row` is the index of the first row among those of all ranks.
    """
    masks = _loss_masks(generations, masks_truncated)
    groups = []
    for _, members in groupby(range(len(prompts)), lambda row: (first_row + row) // group_size):
        rows = list(members)
        prefix = prompts.prefixes[rows[0]]
        branches = []
        for row in rows:
            own_prefix = None if prompts.prefixes[row] == prefix else prompts.prefixes[row]
            branches.append(Branch(generations.completion_ids[row], masks[row], row, own_prefix))
        groups.append(Group(prefix, tuple(branches), row=rows[0]))
    batch = Batch.of(groups)
    if generations.sampling_logps is None:
        return batch
    logps = pad_ragged(generations.sampling_logps, 0.0, dtype=torch.float32)
    return batch.with_columns(sampling_logps=logps)


def _loss_masks(generations: Generations, masks_truncated: bool) -> list[list[bool]]:
    masks = generations.policy_mask
    if masks is None:
        masks = [[True] * len(ids) for ids in generations.completion_ids]
    if not masks_truncated:
        return masks
    is_truncated = generations.truncated().tolist()
    return [
        [False] * len(mask) if left_out else mask
        for mask, left_out in zip(masks, is_truncated, strict=True)
    ]


def mark_truncated(
    table: RewardTable, is_truncated: Tensor, masks_truncated: bool, ranks: Ranks
) -> RewardTable:
    """Set `ended` of the completions of all ranks; `is_truncated` (B,) bool is of this rank.

    With `masks_truncated`, truncated completions become not scorable: baselines leave them out.
    """
    truncated = ranks.gather(is_truncated)
    table = dataclasses.replace(table, ended=~truncated)
    return table.without(truncated) if masks_truncated else table


def rows_with_gradient(batch: Batch) -> Tensor:
    """Mark the rows whose gradient is not exactly zero, if each term has the advantage in it.

    The result (B,) is on the CPU, where rows are selected.
    """
    has_advantage = (batch.columns["advantages"] != 0).view(len(batch), -1)
    return (has_advantage & batch.loss_mask).any(1).cpu()


def completion_advantages(batch: Batch, ranks: Ranks) -> Tensor:
    """Return one advantage for each completion of all ranks (N,): the mean of those of tokens.

    If the loss has whitened advantages of tokens, those from before whitening are returned.
    """
    columns, mask = batch.columns, batch.loss_mask
    advantages = columns["advantages"]
    if "returns" in columns:
        advantages = columns["returns"] - columns["values"]
    if advantages.dim() > 1:
        advantages = masked_mean(advantages, mask, dim=1)
    return ranks.gather(advantages)
