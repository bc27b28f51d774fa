"""Advantages: of completions relative to their group, and of single tokens (GAE).

Rewards and advantages are (N,), rows of one prompt consecutive, `group_size` per prompt. NaN
marks a row that could not be scored: its advantage is 0, and it is left out of its group's
statistics. Equal rewards in a group give advantages of exactly 0. If N is not a multiple of
`group_size`, functions raise a ValueError.

Per-token functions work on B rows of C completion tokens. `mask` (B, C) bool marks the tokens that
the policy wrote; the other tokens are not steps of the episode and are skipped.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from trl.ops.masking import masked_sum, nan_mean, nan_min, nan_std

STD_OFFSET = 1e-4
SMALLEST_VARIANCE = 1e-8
# Whose standard deviation advantages are divided by.
Scale = Literal["group", "batch", "none"]


def leave_one_out(rewards: Tensor, group_size: int) -> Tensor:
    """Reward minus the mean reward of the other scored rows of the group (RLOO, arXiv 2402.14740).

    With n scored rows this is n / (n - 1) * (reward - group mean); 0 where n is 1.
    """
    grouped = _grouped(rewards, group_size)
    count = (~grouped.isnan()).sum(1, keepdim=True)
    advantages = _centered(grouped) * count / (count - 1).clamp(min=1)
    return _flat_without_nan(advantages, rewards)


def group_relative(rewards: Tensor, group_size: int, scale: Scale = "group") -> Tensor:
    """Reward minus the mean of its group, divided by a standard deviation (GRPO, arXiv 2402.03300).

    `scale` "group" divides by the deviation of the group plus 1e-4, "batch" by that of all rows
    plus 1e-4, "none" does not divide (Dr. GRPO, arXiv 2503.20783).
    """
    grouped = _grouped(rewards, group_size)
    advantages = _centered(grouped)
    if scale == "group":
        advantages = advantages / (nan_std(grouped, dim=1, keepdim=True) + STD_OFFSET)
    elif scale == "batch":
        advantages = advantages / (nan_std(rewards) + STD_OFFSET)
    elif scale != "none":
        raise ValueError(f"scale must be 'group', 'batch' or 'none', not {scale!r}.")
    return _flat_without_nan(advantages, rewards)


def normalize_then_sum(per_function: Tensor, weights: Tensor, group_size: int) -> Tensor:
    """Normalize each reward function within its group, sum over functions, whiten the sum (GDPO).

    Rewards are (N, F), NaN where a function does not apply to a row, and weights (F,). A row gets 0
    if no function scored it, or if it is the only scored row of its group.
    """
    grouped = _grouped(per_function, group_size)
    scores = _centered(grouped) / (nan_std(grouped, dim=1, keepdim=True) + STD_OFFSET)
    total = (scores * weights).nansum(-1)
    scored = ~grouped.isnan().all(-1)
    comparable = scored & (scored.sum(1, keepdim=True) > 1)
    whitened = whiten(total.flatten(), scored.flatten())
    return whitened.masked_fill(~comparable.flatten(), 0.0)


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """Scale the marked entries to standard deviation 1 (plus 1e-4).

    Advantages are relative to the group, so their mean is already 0. Subtracting the computed mean
    would only subtract its rounding error and turn exact zeros into small numbers. Excluded entries
    are not read; they are 0 in the result.
    """
    marked = advantages.masked_fill(~mask, torch.nan)
    return (marked / (nan_std(marked) + STD_OFFSET)).masked_fill(~mask, 0.0)


def _grouped(rewards: Tensor, group_size: int) -> Tensor:
    if group_size < 1 or len(rewards) % group_size:
        raise ValueError(
            f"{len(rewards)} rewards cannot be cut into groups of {group_size}: the number of "
            "rewards must be a multiple of the number of completions per prompt."
        )
    return rewards.unflatten(0, (len(rewards) // group_size, group_size))


def _centered(grouped: Tensor) -> Tensor:
    """Subtract the mean over dimension 1; the result is exactly 0 for equal entries."""
    shifted = grouped - nan_min(grouped, dim=1, keepdim=True)
    return shifted - nan_mean(shifted, dim=1, keepdim=True)


def _flat_without_nan(advantages: Tensor, rewards: Tensor) -> Tensor:
    # Only rows without a reward are zeroed: a NaN from any other source must stay visible.
    return advantages.flatten().masked_fill(rewards.isnan(), 0.0)


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> Tensor:
    """Advantage (B, C) of each token (GAE, arXiv 1506.02438): the discounted sum of TD errors.

    `values` (B, C) are the values of the state before each token, without gradient. The returns
    that a value model is fitted to are advantages plus values. The value after the last marked
    token is 0. `gamma` discounts each step and `lam` later TD errors: with `lam` 1 the advantage is
    return minus value, with 0 it is the one-step TD error.
    """
    advantages = torch.zeros_like(rewards)
    next_advantage = rewards.new_zeros(rewards.shape[0])  # of the next marked token
    next_value = torch.zeros_like(next_advantage)
    for index in reversed(range(rewards.shape[1])):
        is_step = mask[:, index]
        td_error = rewards[:, index] + gamma * next_value - values[:, index]
        advantage = td_error + gamma * lam * next_advantage
        advantages[:, index] = torch.where(is_step, advantage, 0.0)
        next_advantage = torch.where(is_step, advantage, next_advantage)
        next_value = torch.where(is_step, values[:, index], next_value)
    return advantages


def token_rewards(rewards: Tensor, penalties: Tensor, mask: Tensor) -> Tensor:
    """Token rewards (B, C): the penalties, plus the row's reward (B,) at its last marked token."""
    marked_so_far = mask.cumsum(1)
    is_last = mask & (marked_so_far == marked_so_far[:, -1:])
    return penalties + torch.where(is_last, rewards[:, None], 0.0)


def whitened(
    values: Tensor, mask: Tensor, total: Callable[[Tensor], Tensor], keeps_mean: bool = False
) -> Tensor:
    """Scale the marked entries (B, C) of all ranks to variance 1 (Bessel's correction) and mean 0.

    `total` sums a tensor () over all ranks. With `keeps_mean`, the mean does not change.
    """
    count = total(mask.sum())
    mean = total(masked_sum(values, mask)) / count.clamp(min=1)
    squares = total(masked_sum((values - mean).square(), mask))
    scale = (squares / (count - 1).clamp(min=1) + SMALLEST_VARIANCE).rsqrt()
    centered = (values - mean) * scale
    return torch.where(mask, centered + mean if keeps_mean else centered, 0.0)


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, width: float) -> Tensor:
    """PPO's clipped value loss (B, C): half of the larger of two squared errors.

    One is of the values, the other of the values clipped to within `width` of the `old` ones.
    """
    clipped = old + (values - old).clamp(-width, width)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
