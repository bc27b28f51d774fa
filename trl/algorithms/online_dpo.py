"""Online DPO: two completions of each prompt, one of which is preferred (arXiv 2402.04792)."""

from dataclasses import dataclass

import torch

from ..batch import Batch, Step
from ..online.metrics import MetricStore, record_pairs
from ..ops.masking import masked_sum, nan_mean
from ..ops.preference_losses import PAIR_LOSSES, PairOptions, PairScores
from ..types import TokenScores
from .base import Algorithm, LossTerms, Needs


@dataclass(frozen=True, kw_only=True)
class OnlineDPO(Algorithm[TokenScores]):
    """DPO losses of the pairs of completions that a policy wrote itself."""

    beta: float = 0.1  # how closely the policy is held to the reference
    loss_type: str = "sigmoid"  # or "ipo"
    missing_eos_penalty: float | None = None  # subtracted where a completion was cut off

    @property
    def needs(self) -> Needs:
        """Log-ratios to the reference, and both completions of a pair at once."""
        return Needs(ref_logps=True, ratio="token", whole_groups=True)

    def credit(self, step: Step, metrics: MetricStore) -> Step:
        """Mark the completions: 1 if preferred, -1 if not, 0 if one could not be scored."""
        table = step.rewards
        rewards = table.with_truncation_penalty(self.missing_eos_penalty)
        pairs = rewards.view(-1, 2)
        difference = pairs[:, 0] - pairs[:, 1]
        metrics.value("objective/scores", nan_mean(rewards))
        metrics.value("objective/scores_margin", nan_mean(difference.abs()))
        metrics.value("val/contain_eos_token", table.has_ended.float().mean())
        first = torch.where(difference >= 0, 1.0, -1.0).masked_fill(difference.isnan(), 0.0)
        step = step.with_rewards(rewards)
        return step.with_advantages(torch.stack([first, -first], 1).flatten())

    def loss(self, scores: TokenScores, batch: Batch, metrics: MetricStore) -> LossTerms:
        """Losses of pairs, whose rows are neighbors, averaged over pairs."""
        columns = batch.columns
        mask = batch.loss_mask
        preference = columns["advantages"].view(-1, 2)
        better_first = preference.argsort(dim=1, descending=True, stable=True)
        logps = masked_sum(scores.logps, mask, dim=1).view(-1, 2)
        log_ratios = masked_sum(scores.logps - columns["ref_logps"], mask, dim=1).view(-1, 2)
        logps = logps.gather(1, better_first)
        log_ratios = log_ratios.gather(1, better_first)
        record_pairs(metrics, logps, log_ratios, columns["rewards"], self.beta)
        # A completion counts as one token where losses are of means over tokens.
        one_token = torch.ones_like(log_ratios[:, 0])
        pairs = PairScores(
            chosen=log_ratios[:, 0],
            rejected=log_ratios[:, 1],
            chosen_lengths=one_token,
            rejected_lengths=one_token,
        )
        losses = PAIR_LOSSES[self.loss_type](pairs, PairOptions(beta=self.beta))
        is_scored = preference[:, 0].abs()
        return {"pairs": ((losses * is_scored).sum(), batch.totals.groups)}
