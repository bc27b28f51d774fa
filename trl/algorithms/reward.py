"""Reward models: the better of two answers gets the higher score."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import Batch
from ..online.metrics import MetricStore
from ..ops.masking import masked_sum
from ..ops.preference_losses import ranking_loss
from .base import Algorithm, LossTerms, Needs


@dataclass(frozen=True, kw_only=True)
class RewardModel(Algorithm[Tensor]):
    """Ranking losses, averaged over all pairs of a better and a worse answer of a step.

    The branches of a group are K answers to a prompt, with a `rank`. Scores are (B,), one for each.
    """

    center_rewards_coefficient: float | None = None  # weight of squared sums of a pair's scores

    @property
    def needs(self) -> Needs:
        """Whole groups; nothing else."""
        return Needs(whole_groups=True)

    def loss(self, scores: Tensor, batch: Batch, metrics: MetricStore) -> LossTerms:
        """Return the sum over pairs."""
        values = batch.by_group(scores)  # (G, K)
        better = values[:, :, None]
        worse = values[:, None, :]
        margins = batch.by_group(batch.columns["margin"])[:, :1, None].to(values.dtype)
        losses = ranking_loss(better, worse, margins)
        if self.center_rewards_coefficient is not None:
            losses = losses + self.center_rewards_coefficient * (better + worse).square()
        self._record(values.detach(), batch, metrics)
        return {"pairs": (masked_sum(losses, batch.is_better), batch.totals.pairs)}

    def predictions(self, scores: Tensor, batch: Batch) -> Mapping[str, Tensor]:
        """Return the scores of answers (G, K)."""
        return {"scores": batch.by_group(scores.detach())}

    def _record(self, values: Tensor, batch: Batch, metrics: MetricStore) -> None:
        """Record accuracy and margin of pairs, and mean and range of the scores (G, K)."""
        is_pair = batch.is_better
        exists = batch.exists
        difference = values[:, :, None] - values[:, None, :]
        metrics.mean("accuracy", ((difference > 0) & is_pair).sum(), is_pair.sum())
        metrics.mean("margin", masked_sum(difference, is_pair), is_pair.sum())
        metrics.mean("mean_reward", masked_sum(values, exists), exists.sum())
        metrics.minimum("min_reward", values.masked_fill(~exists, torch.inf).amin())
        metrics.maximum("max_reward", values.masked_fill(~exists, -torch.inf).amax())
