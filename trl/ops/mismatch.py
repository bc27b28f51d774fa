"""Weights for tokens that were drawn with other probabilities than those of the policy.

Engines that generate compute other numbers than the trainer, so even the newest weights draw from a
slightly different policy. Truncated importance sampling is from "Your Efficient RL Framework
Secretly Brings You Off-Policy RL Training" (Yao et al. 2025), masking from IcePop (arXiv
2510.18855).

Shapes: B rows, C completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trl.ops.policy_losses import RatioLevel, importance_ratio

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(frozen=True)
class RatioBounds:
    """How the ratio of the probabilities of trainer and sampler becomes a weight of the loss.

    There is one a token, or their product for each completion ("sequence"). Beyond the bounds it is
    set to the bound ("truncate") or to 0 ("mask").
    """

    mode: str = "sequence_mask"  # one of `MODES`
    low: float | None = None  # None: unbounded
    high: float | None = 3.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}.")

    @property
    def level(self) -> RatioLevel:
        """Of what there is one ratio."""
        return "token" if self.mode.startswith("token") else "sequence_sum"

    def ratio(self, logps: Tensor, sampling_logps: Tensor, mask: Tensor) -> Tensor:
        """pi_trainer / pi_sampler, before the bounds: (B, C) or (B, 1); NaN where either is NaN.

        Both log-probabilities (B, C) are of the policy that generated: as the trainer computes
        them, and those with which the tokens were drawn. Its logarithm is bounded by 20 in size.
        """
        return importance_ratio(logps, sampling_logps, mask, self.level)

    def beyond(self, ratio: Tensor) -> Tensor:
        """Mark the ratios outside the bounds; NaN is not outside."""
        outside = torch.zeros_like(ratio, dtype=torch.bool)
        if self.high is not None:
            outside |= ratio > self.high
        if self.low is not None:
            outside |= ratio < self.low
        return outside

    def weight(self, ratio: Tensor) -> Tensor:
        """The weight of the loss, without gradient; NaN stays NaN."""
        ratio = ratio.detach()
        if self.mode.endswith("_mask"):
            return ratio.masked_fill(self.beyond(ratio), 0.0)
        if self.low is None and self.high is None:
            return ratio
        return ratio.clamp(self.low, self.high)


def scale_gradient(values: Tensor, weights: Tensor) -> Tensor:
    """Return `values`, with a gradient multiplied by `weights` of a shape that broadcasts."""
    fixed = values.detach()
    return fixed + weights * (values - fixed)
