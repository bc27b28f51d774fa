"""The clipped policy loss that several algorithms share."""

from torch import Tensor

from ..batch import Batch
from ..online.metrics import MetricStore, record_clipping
from ..ops.policy_losses import clip_flags, clipped_surrogate


def clipped_losses(
    batch: Batch,
    mask: Tensor,
    clip_range: tuple[float, float],
    metrics: MetricStore,
    delta: float | None = None,
) -> Tensor:
    """Return the weighted clipped surrogate (B, C) or (B, 1), and record what is clipped.

    The ratio of the batch is clipped to 1 minus the first and 1 plus the second number of
    `clip_range`; `delta` bounds the unclipped one from above. `mask` marks the entries that count
    in the metrics.
    """
    ratio, advantages = batch.columns["ratio"], batch.columns["advantages"]
    too_low, too_high = clip_flags(ratio, advantages, *clip_range)
    record_clipping(metrics, too_low, too_high, mask)
    return batch.weighted(clipped_surrogate(ratio, advantages, *clip_range, delta))


def ratio_mask(batch: Batch) -> Tensor:
    """Mark what has a ratio: tokens in the loss (B, C), or completions with such a token (B, 1)."""
    if batch.columns["ratio"].shape[1] > 1:
        return batch.loss_mask
    return batch.loss_mask.any(1, keepdim=True)
