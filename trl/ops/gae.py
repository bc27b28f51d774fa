"""Credit of single tokens from rewards and estimated values (GAE, arXiv 1506.02438).

Shapes: B rows, C completion tokens. `mask` (B, C) bool marks the tokens of a completion that the
policy wrote; the others have no step of their own: credit passes over them.
"""

import torch
from torch import Tensor


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> Tensor:
    """Advantage (B, C) of each token: the discounted sum of what turned out better than expected.

    Returns to fit values to are these advantages plus the values. The value after the last marked
    token is 0.

    Args:
        rewards (`Tensor`): (B, C) float.
        values (`Tensor`): (B, C) of the state before each token, without gradient.
        mask (`Tensor`): (B, C) bool; nothing else is read, and advantages are 0 there.
        gamma (`float`): discount of a step.
        lam (`float`): weight of later surprises; 1 gives returns minus values, 0 one step.
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


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, width: float) -> Tensor:
    """Half the squared error (B, C), of the worse of a value and one that moved at most `width`.

    Args:
        values (`Tensor`): (B, C) current values.
        old (`Tensor`): (B, C) values when the rollout was made.
        returns (`Tensor`): (B, C) what they should be.
        width (`float`): how far a value may move from the old one.
    """
    near = old + (values - old).clamp(-width, width)
    return 0.5 * torch.maximum((values - returns).square(), (near - returns).square())
