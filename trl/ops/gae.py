"""Credit of single tokens from rewards and estimated values (GAE, arXiv 1506.02438).

Shapes: B rows, C completion tokens. `mask` (B, C) bool marks the tokens of a completion that the
policy wrote; the others have no step of their own: credit passes over them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from trl.ops.masking import masked_sum

SMALLEST_VARIANCE = 1e-8


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> Tensor:
    """Advantage (B, C) of each token: the discounted sum of what turned out better than expected.

    Returns to fit values to are these advantages plus the values, which are those of the state
    before each token, without gradient. The value after the last marked token is 0. `gamma`
    discounts a step, `lam` later surprises: 1 gives returns minus values, 0 one step.
    """
    advantages = torch.zeros_like(rewards)
    following = rewards.new_zeros(rewards.shape[0])  # advantage of the next marked token
    next_value = torch.zeros_like(following)
    for place in reversed(range(rewards.shape[1])):
        here = mask[:, place]
        surprise = rewards[:, place] + gamma * next_value - values[:, place]
        found = surprise + gamma * lam * following
        advantages[:, place] = torch.where(here, found, 0.0)
        following = torch.where(here, found, following)
        next_value = torch.where(here, values[:, place], next_value)
    return advantages


def token_rewards(rewards: Tensor, penalties: Tensor, mask: Tensor) -> Tensor:
    """Penalties (B, C), and at the last marked token of a row also the reward (B,) of the row."""
    counted = mask.cumsum(1)
    is_last = mask & (counted == counted[:, -1:])
    return penalties + torch.where(is_last, rewards[:, None], 0.0)


def whitened(
    values: Tensor, mask: Tensor, total: Callable[[Tensor], Tensor], keeps_mean: bool = False
) -> Tensor:
    """Scale the marked entries (B, C) of all ranks to variance 1 (Bessel's correction) and mean 0.

    `total` adds a tensor () up over all ranks; `keeps_mean` leaves the mean as it is.
    """
    count = total(mask.sum())
    mean = total(masked_sum(values, mask)) / count.clamp(min=1)
    squares = total(masked_sum((values - mean).square(), mask))
    scale = (squares / (count - 1).clamp(min=1) + SMALLEST_VARIANCE).rsqrt()
    centered = (values - mean) * scale
    return torch.where(mask, centered + mean if keeps_mean else centered, 0.0)


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, width: float) -> Tensor:
    """Half the squared error (B, C), of the worse of a value and one within `width` of the old."""
    near = old + (values - old).clamp(-width, width)
    return 0.5 * torch.maximum((values - returns).square(), (near - returns).square())
