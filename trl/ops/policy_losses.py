"""Policy-gradient losses, importance ratios, and aggregation of token losses.

Shapes: B rows, C completion tokens. Ratios are (B, C), of tokens, or (B, 1), of completions.
Advantages are (B,) or (B, C). Losses have the broadcast shape. They are not averaged until an
aggregation function is called with the denominator of the whole rollout batch.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trl.ops.kl import EXPONENT_BOUND
from trl.ops.masking import masked_mean, masked_sum

RatioLevel = Literal["token", "sequence_mean", "sequence_sum"]
SMALLEST_RATIO = 1e-8


def log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor, level: RatioLevel) -> Tensor:
    """Logarithm of pi / pi_old for each token, or for each completion.

    Token differences are summed: a difference of sums would lose precision on long completions.
    Tokens that `mask` (B, C) excludes are never read.

    The result is (B, C) for the level "token", and (B, 1) for "sequence_mean" (GSPO, arXiv
    2507.18071) and "sequence_sum" (RLOO).
    """
    difference = torch.where(mask, logps - old_logps, 0.0)
    if level == "token":
        return difference
    if level == "sequence_sum":
        return masked_sum(difference, mask, dim=1)[:, None]
    if level == "sequence_mean":
        return masked_mean(difference, mask, dim=1)[:, None]
    raise ValueError(f"level must be token, sequence_mean or sequence_sum, not {level!r}.")


def importance_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor, level: RatioLevel) -> Tensor:
    """pi / pi_old: exp of `log_ratio`, clamped to [-20, 20] so that it cannot overflow."""
    logarithm = log_ratio(logps, old_logps, mask, level)
    return logarithm.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp()


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    epsilon: float,
    epsilon_high: float,
    delta: float | None = None,
) -> Tensor:
    """Negative clipped surrogate of PPO (arXiv 1707.06347).

    The ratio is clipped to [1 - epsilon, 1 + epsilon_high]; `delta` bounds the unclipped one from
    above (two-sided clipping, arXiv 2505.07291).
    """
    advantages = _columns(advantages)
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    if delta is not None:
        ratio = ratio.clamp(max=delta)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def clip_flags(
    ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """Mark where clipping removes the gradient: below the range for A < 0, above it for A > 0."""
    advantages = _columns(advantages)
    low = (ratio < 1 - epsilon) & (advantages < 0)
    high = (ratio > 1 + epsilon_high) & (advantages > 0)
    return low, high


def cispo(ratio: Tensor, logps: Tensor, advantages: Tensor, ratio_max: float) -> Tensor:
    """Clipped importance-sampling weight times log-probability (CISPO, arXiv 2506.13585).

    The weight is min(ratio, ratio_max), without gradient.
    """
    return -ratio.detach().clamp(max=ratio_max) * _columns(advantages) * logps


def sapo(
    ratio: Tensor, advantages: Tensor, temperature_pos: float, temperature_neg: float
) -> Tensor:
    """Soft gate instead of a hard clip (SAPO, arXiv 2511.20347).

    -4 / tau * sigmoid(tau * (ratio - 1)) * A; tau is `temperature_pos` where A > 0.
    """
    advantages = _columns(advantages)
    tau = _by_sign(advantages > 0, advantages, temperature_pos, temperature_neg)
    return -4.0 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages


class GammaShape(NamedTuple):
    """Parameters of VESPO's weight: the power of the ratio, and the rate of its decay."""

    k: float
    decay: float


def vespo_weight(
    log_ratios: Tensor,
    mask: Tensor,
    advantages: Tensor,
    shape_pos: GammaShape,
    shape_neg: GammaShape,
) -> Tensor:
    """Gamma-shaped weight of a completion's ratio w: log phi = lambda + k log w - lambda w.

    The token log-ratios (B, C) are clamped to [-20, 20], and their sum to [log 1e-8, 20].
    `shape_pos` is for A >= 0. The weight (B, 1) or (B, C) has no gradient.
    """
    advantages = _columns(advantages)
    bounded = log_ratios.detach().clamp(-EXPONENT_BOUND, EXPONENT_BOUND)
    log_w = masked_sum(bounded, mask, dim=1)[:, None]
    log_w = log_w.clamp(math.log(SMALLEST_RATIO), EXPONENT_BOUND)
    k, decay = (
        _by_sign(advantages >= 0, advantages, positive, negative)
        for positive, negative in zip(shape_pos, shape_neg, strict=True)
    )
    return (decay + k * log_w - decay * log_w.exp()).exp()


def vespo(weight: Tensor, logps: Tensor, advantages: Tensor) -> Tensor:
    """Weighted policy gradient -phi * A * log pi (VESPO); `weight` is from `vespo_weight`."""
    return -weight * _columns(advantages) * logps


def off_policy_mask(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """Mark the rows to keep: A >= 0, or a policy that has not moved far from the sampler.

    The distance is mean_t(old - logps) over the loss tokens, in nats; a token whose old
    log-probability is NaN, because the sampler did not report it, counts as 0. Rows of negative
    advantage are kept up to a distance of `threshold`. The result is (B, 1) bool, or (B, C) for
    advantages (B, C).
    """
    difference = (old_logps - logps).detach().masked_fill(old_logps.isnan(), 0.0)
    moved = masked_mean(difference, mask, dim=1)[:, None]
    return (_columns(advantages) >= 0) | (moved <= threshold)


def mean_of_sequence_means(losses: Tensor, mask: Tensor, rows: Tensor | float) -> Tensor:
    """Average over the marked tokens of each completion, then divide their sum by `rows` > 0."""
    return masked_mean(losses, mask, dim=1).sum() / rows


def sum_over(losses: Tensor, mask: Tensor, denominator: Tensor | float) -> Tensor:
    """Sum the losses over the marked tokens and divide.

    The denominator, above 0, is the number of tokens of the rollout batch for a token mean (DAPO,
    arXiv 2503.14476), of the micro-batch for a local token mean, of rows for a mean of sums, or
    rows times a constant width (Dr. GRPO, arXiv 2503.20783).
    """
    losses, mask = torch.broadcast_tensors(losses, mask)
    return masked_sum(losses, mask) / denominator


def _columns(advantages: Tensor) -> Tensor:
    return advantages[:, None] if advantages.dim() == 1 else advantages


def _by_sign(condition: Tensor, like: Tensor, positive: float, negative: float) -> Tensor:
    # torch.where with two Python numbers would round them to float32.
    return torch.full_like(like, negative).masked_fill(condition, positive)


MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(frozen=True)
class RatioBounds:
    """Importance-sampling correction: bounds on the ratio between trainer and sampler probability.

    Generation engines round differently from the trainer, so even with the same weights they sample
    from a slightly different policy. The loss is weighted by one ratio per token, or by the product
    over each completion ("sequence"). Outside the bounds it is set to the bound ("truncate": "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training", Yao et al. 2025) or to 0
    ("mask": IcePop, arXiv 2510.18855).
    """

    mode: str = "sequence_mask"  # one of `MODES`
    low: float | None = None  # None: unbounded
    high: float | None = 3.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}.")

    @property
    def level(self) -> RatioLevel:
        """Whether there is one ratio for each token, or the product over each completion."""
        return "token" if self.mode.startswith("token") else "sequence_sum"

    def ratio(self, logps: Tensor, sampling_logps: Tensor, mask: Tensor) -> Tensor:
        """pi_trainer / pi_sampler, before the bounds: (B, C) or (B, 1); NaN where either is NaN.

        Both log-probabilities (B, C) belong to the weights that generated: `logps` as the trainer
        computes them, `sampling_logps` as the sampler drew with. The log-ratio is clamped to
        [-20, 20].
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
    """Return `values` unchanged, and multiply their gradient by `weights`; shapes broadcast."""
    fixed = values.detach()
    return fixed + weights * (values - fixed)
