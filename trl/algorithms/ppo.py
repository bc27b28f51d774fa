"""PPO: tokens are credited with how much better they turned out than a value model expected."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..batch import Batch, Step
from ..distributed import Ranks
from ..online.metrics import MetricStore
from ..ops.advantages import clipped_value_loss, generalized_advantages, token_rewards, whitened
from ..ops.kl import k1, k3
from ..ops.masking import masked_sum, nan_mean
from ..ops.policy_losses import clip_flags, log_ratio
from ..types import TokenScores
from .base import Algorithm, LossTerms, Needs, clipped_losses, record_term


@dataclass(kw_only=True)
class EarlyStop:
    """Detects that updates moved the policy too far from the one that generated."""

    target_kl: float | None = None  # half the mean squared log-ratio of tokens; None: never stop
    # Sum of halved squares and number of tokens of each chunk of the update being computed.
    _observed: list[Tensor] = field(default_factory=list, init=False)

    def discard_update(self) -> None:
        """Discard the chunks of an update that is computed again or dropped."""
        self._observed.clear()

    def observe(self, half_squares: Tensor, token_count: Tensor) -> None:
        """Remember a chunk: the sum () of its halved squared log-ratios, and its tokens ()."""
        self._observed.append(torch.stack([half_squares.detach(), token_count]))

    def end_update(self, ranks: Ranks, metrics: MetricStore) -> bool:
        """Whether the policy moved too far on all ranks together, which all call this."""
        is_too_far = False
        if self.target_kl is not None and self._observed:
            half_squares, token_count = ranks.sum(torch.stack(self._observed).sum(0)).tolist()
            is_too_far = half_squares > self.target_kl * token_count
            metrics.value("policy/early_stops", float(is_too_far))
        self._observed.clear()
        return is_too_far


@dataclass(kw_only=True, eq=False)
class PPO(Algorithm[TokenScores]):
    """Clipped losses of policy and values; fields are as in `PPOConfig`."""

    state_fields = ("early_stop", "episodes")

    beta: float = 0.05
    kl_estimator: str = "k1"
    gamma: float = 1.0
    lam: float = 0.95
    clip_range: tuple[float, float] = (0.2, 0.2)  # how far the ratio may be below and above 1
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    entropy_coef: float = 0.0
    whiten_rewards: bool = False
    missing_eos_penalty: float | None = None
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    episodes: int = 0  # completions of all ranks so far; checkpoints hold it

    @property
    def needs(self) -> Needs:
        """The value loss is not a multiple of the advantage."""
        return Needs(
            old_logps=True,
            ref_logps=self.beta != 0.0,
            values=True,
            entropies=self.entropy_coef != 0.0,
            ratio="token",
        )

    def discard_update(self) -> None:
        """Discard the log-ratios of an update that is computed again or dropped."""
        self.early_stop.discard_update()

    def end_update(self, ranks: Ranks, metrics: MetricStore) -> bool:
        """Drop the rollout batch once an update moved the policy too far."""
        return self.early_stop.end_update(ranks, metrics)

    def credit(self, step: Step, metrics: MetricStore) -> Step:
        """Credit tokens by generalized advantage estimation, scaled over the rollout batch."""
        table = step.rewards
        rewards = table.with_truncation_penalty(self.missing_eos_penalty)
        if step.mode == "train":
            self.episodes += len(rewards)
            metrics.maximum("episode", self.episodes)
        metrics.value("objective/scores", nan_mean(rewards))
        metrics.value("val/num_eos_tokens", table.has_ended.float().sum())
        step = step.with_rewards(rewards)
        batch = step.batch
        mask = _scored_tokens(batch)
        penalties = self._penalties(batch, metrics)
        reward_per_token = token_rewards(batch.columns["rewards"], penalties, batch.loss_mask)
        if self.whiten_rewards:
            reward_per_token = whitened(reward_per_token, mask, step.ranks.sum, keeps_mean=True)
        values = batch.columns["values"]
        advantages = generalized_advantages(reward_per_token, values, mask, self.gamma, self.lam)
        batch = batch.with_columns(
            returns=advantages + values, advantages=whitened(advantages, mask, step.ranks.sum)
        )
        return step.with_batches([batch])

    def _penalties(self, batch: Batch, metrics: MetricStore) -> Tensor:
        """Return the KL penalties (B, C) that are added to the rewards of tokens."""
        columns = batch.columns
        mask = batch.loss_mask
        penalties = torch.zeros_like(columns["values"])
        if self.beta != 0.0:
            estimate = k1 if self.kl_estimator == "k1" else k3
            penalties = -self.beta * estimate(columns["old_logps"], columns["ref_logps"], mask)
        row_penalties = penalties.sum(1)
        entropies = -masked_sum(columns["old_logps"], mask, dim=1)
        metrics.value("objective/entropy", entropies.mean())
        if self.beta != 0.0:
            metrics.value("objective/kl", -row_penalties.mean() / self.beta)
        metrics.value("objective/non_score_reward", row_penalties.mean())
        metrics.value("objective/rlhf_reward", nan_mean(columns["rewards"] + row_penalties))
        return penalties

    def loss(self, scores: TokenScores, batch: Batch, metrics: MetricStore) -> LossTerms:
        """Clipped losses of policy and values, averaged over tokens."""
        mask = _scored_tokens(batch)
        total = batch.totals.tokens
        policy = masked_sum(clipped_losses(batch, mask, self.clip_range, metrics), mask)
        value = masked_sum(self._value_losses(scores, batch), mask)
        self._record_update(scores, batch, metrics)
        record_term(metrics, "loss/policy_avg", (policy, total), batch)
        record_term(metrics, "loss/value_avg", (value, total), batch)
        terms = {"policy": (policy, total), "value": (self.vf_coef * value, total)}
        if self.entropy_coef != 0.0:
            if scores.entropies is None:
                raise ValueError("The entropy bonus needs the entropies of the tokens.")
            bonus = -self.entropy_coef * masked_sum(scores.entropies, mask)
            terms["entropy"] = (bonus, total)
        return terms

    def _value_losses(self, scores: TokenScores, batch: Batch) -> Tensor:
        """Return the clipped losses (B, C) of the values that the forward computed."""
        if scores.values is None:
            raise ValueError("PPO needs the values of the tokens.")
        old_values = batch.columns["values"]
        returns = batch.columns["returns"]
        return clipped_value_loss(scores.values, old_values, returns, self.cliprange_value)

    @torch.no_grad()
    def _record_update(self, scores: TokenScores, batch: Batch, metrics: MetricStore) -> None:
        columns = batch.columns
        mask = _scored_tokens(batch)
        count = mask.sum()
        ratio = columns["ratio"]
        too_low, too_high = clip_flags(ratio, columns["advantages"], *self.clip_range)
        is_clipped = (too_low | too_high).float()
        metrics.mean("policy/clipfrac_avg", masked_sum(is_clipped, mask), count)
        if scores.values is not None:
            unclipped = 0.5 * (scores.values - columns["returns"]).square()
            is_worse = self._value_losses(scores, batch) > unclipped
            metrics.mean("val/clipfrac_avg", (is_worse & mask).sum(), count)
        log_ratios = log_ratio(scores.logps, columns["old_logps"], mask, "token")
        half_squares = 0.5 * log_ratios.square().sum()
        metrics.mean("policy/approxkl_avg", half_squares, count)
        metrics.mean("val/ratio", masked_sum(ratio, mask), count)
        metrics.mean("val/ratio_var", masked_sum((ratio - 1).square(), mask), count)
        if scores.entropies is not None:
            metrics.mean("policy/entropy_avg", masked_sum(scores.entropies, mask), count)
        if batch.mode == "train":
            self.early_stop.observe(half_squares, count)


def _scored_tokens(batch: Batch) -> Tensor:
    """Mark the tokens (B, C) in the loss of completions that have a reward."""
    return batch.loss_mask & ~batch.columns["rewards"].isnan()[:, None]
