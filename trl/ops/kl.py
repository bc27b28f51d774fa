"""Estimators of KL(policy || reference) from tokens that the policy sampled.

The estimators are those of Schulman, "Approximating KL Divergence" (2020). Shapes: B rows,
C completion tokens. With `mask` (B, C) bool, excluded positions are exactly 0 and have no gradient,
whatever values they hold.
"""

import torch
from torch import Tensor

from trl.ops.masking import masked_sum

EXPONENT_BOUND = 20.0


def k1(logps: Tensor, ref_logps: Tensor, mask: Tensor | None = None) -> Tensor:
    """First-order estimate log p - log q: unbiased; it may be negative.

    In a reward, its policy gradient is the gradient of the KL divergence itself.
    """
    difference = logps - ref_logps
    return difference if mask is None else torch.where(mask, difference, 0.0)


def k3(logps: Tensor, ref_logps: Tensor, mask: Tensor | None = None) -> Tensor:
    """exp(d) - d - 1 with d = log q - log p: never negative; unbiased as a value.

    Its policy gradient is not that of the KL divergence, so it belongs in a loss and not in a
    reward. The exponent is clamped to at most 20, so that it cannot overflow.
    """
    difference = -k1(logps, ref_logps, mask)
    # expm1 is accurate for small differences, where exp(d) - 1 would cancel.
    return difference.clamp(max=EXPONENT_BOUND).expm1() - difference


def sequence_kl(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """Unbiased estimate (B,) of the KL divergence between whole sequences: a row's sum of `k1`."""
    return masked_sum(k1(logps, ref_logps), mask, dim=1)
