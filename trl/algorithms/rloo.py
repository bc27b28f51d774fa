"""RLOO: REINFORCE with the rewards of the sibling completions as baseline (arXiv 2402.14740)."""

from dataclasses import dataclass

from torch import Tensor

from ..batch import Batch, Step
from ..online.metrics import MetricStore
from ..ops.advantages import leave_one_out, whiten
from ..ops.kl import sequence_kl
from ..ops.masking import masked_sum
from ..types import TokenScores
from .base import Algorithm, LossTerms, Needs, clipped_losses


@dataclass(frozen=True, kw_only=True)
class RLOO(Algorithm[TokenScores]):
    """Clipped ratios of completions, whose rewards are compared with those of their siblings."""

    beta: float = 0.0  # weight of the KL penalty in the reward
    clip_range: tuple[float, float] = (0.2, 0.2)  # how far the ratio may be below and above 1
    reward_clip_range: tuple[float, float] | None = None  # lowest and highest reward
    normalize_advantages: bool = False  # to a standard deviation of 1

    @property
    def needs(self) -> Needs:
        """The KL penalty needs both policies before credit."""
        is_penalized = self.beta != 0.0
        return Needs(
            old_logps=is_penalized,
            ref_logps=is_penalized,
            ratio="sequence_sum",
            only_advantages=True,
        )

    def credit(self, step: Step, metrics: MetricStore) -> Step:
        """Compare the penalized reward of each completion with those of its siblings."""
        rewards = self._penalized_rewards(step, metrics)
        advantages = leave_one_out(rewards, step.rewards.group_size)
        if self.normalize_advantages:
            advantages = whiten(advantages, ~rewards.isnan())
        return step.with_advantages(advantages)

    def _penalized_rewards(self, step: Step, metrics: MetricStore) -> Tensor:
        """Clip the task rewards (N,) of all ranks, and subtract the KL penalty."""
        rewards = step.rewards.total
        if self.reward_clip_range is not None:
            rewards = rewards.clamp(*self.reward_clip_range)
        if self.beta == 0.0:
            return rewards
        batch = step.batch
        columns = batch.columns
        mask = batch.loss_mask
        divergences = sequence_kl(columns["old_logps"], columns["ref_logps"], mask)
        metrics.mean("kl", divergences.sum(), mask.sum())
        return rewards - self.beta * step.ranks.gather(divergences)

    def loss(self, scores: TokenScores, batch: Batch, metrics: MetricStore) -> LossTerms:
        """Clipped surrogate of whole completions, averaged over completions."""
        rows = batch.loss_mask.any(1, keepdim=True)
        losses = clipped_losses(batch, rows, self.clip_range, metrics)
        return {"policy": (masked_sum(losses, rows), batch.totals.rows)}
