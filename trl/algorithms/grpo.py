"""GRPO: advantages relative to the group, and a per-token objective with many variants."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..batch import Batch, Step
from ..distributed import Ranks
from ..online.metrics import MetricStore
from ..ops import policy_losses as objectives
from ..ops.advantages import Scale, group_relative, normalize_then_sum
from ..ops.entropy import entropy_threshold, high_entropy_mask
from ..ops.kl import k3
from ..ops.masking import masked_mean, masked_sum
from ..types import TokenScores
from .base import Algorithm, LossTerms, Needs, clipped_losses, ratio_mask, record_term
from .entropy_bonus import EntropyController

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


@dataclass(frozen=True, kw_only=True)
class GRPO(Algorithm[TokenScores]):
    """Objectives of tokens or completions; fields are as in `GRPOConfig`."""

    state_fields = ("entropy",)

    loss_type: str = "dapo"
    scale_rewards: Scale = "group"
    multi_objective_aggregation: str = "sum_then_normalize"
    importance_sampling_level: str = "token"
    clip_range: tuple[float, float] = (0.2, 0.2)  # how far the ratio may be below and above 1
    delta: float | None = None
    cispo_ratio_max: float = 1.2
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_pos: objectives.GammaShape = objectives.GammaShape(2.0, 3.0)  # advantage >= 0
    vespo_neg: objectives.GammaShape = objectives.GammaShape(3.0, 2.0)
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    max_completion_length: int = 256
    entropy: EntropyController = field(default_factory=EntropyController)

    @property
    def needs(self) -> Needs:
        """Neither the KL penalty in the loss nor the bonus is a multiple of the advantage."""
        is_per_token = self.importance_sampling_level == "token"
        return Needs(
            ref_logps=self.beta != 0.0,
            entropies=self.entropy.is_used,
            credit_entropies=self.top_entropy_quantile < 1.0,
            ratio="token" if is_per_token else "sequence_mean",
            # These weigh log-probabilities of tokens, not the ratio.
            token_losses=self.loss_type in ("cispo", "vespo"),
            only_advantages=self.beta == 0.0 and not self.entropy.is_used,
        )

    def discard_update(self) -> None:
        """Discard the entropies of an update that is computed again or dropped."""
        self.entropy.discard_update()

    def end_update(self, ranks: Ranks, metrics: MetricStore) -> bool:
        """Move the entropy coefficient for the next update."""
        self.entropy.end_update(ranks, metrics)
        return False

    def credit(self, step: Step, metrics: MetricStore) -> Step:
        """Compare each completion with its group, and choose the tokens of high entropy."""
        table = step.rewards
        if self.multi_objective_aggregation == "normalize_then_sum":
            advantages = normalize_then_sum(table.per_function, table.weights, table.group_size)
        else:
            advantages = group_relative(table.total, table.group_size, self.scale_rewards)
        step = step.with_advantages(advantages)
        if self.top_entropy_quantile == 1.0:
            return step
        mask = self._high_entropies(step)
        return step.with_batches(
            [step.batch.without_columns("entropies").with_columns(objective_mask=mask)]
        )

    def _high_entropies(self, step: Step) -> Tensor:
        """Mark the tokens in the loss (B, C) that have the highest entropies.

        The share `top_entropy_quantile` is of the tokens of all ranks; all ranks call this.
        """
        batch = step.batch
        entropies = batch.columns["entropies"]
        in_loss = entropies.masked_fill(~batch.loss_mask, -torch.inf)
        missing_width = int(step.ranks.max(in_loss.shape[1])) - in_loss.shape[1]
        padded = pad(in_loss, (0, missing_width), value=-torch.inf)
        all_ranks = step.ranks.gather(padded)
        threshold = entropy_threshold(all_ranks.flatten(), self.top_entropy_quantile)
        return high_entropy_mask(entropies, batch.loss_mask, threshold)

    def loss(self, scores: TokenScores, batch: Batch, metrics: MetricStore) -> LossTerms:
        """Return the objective of the tokens, with KL penalty and entropy bonus."""
        losses = self._objective(scores, batch, metrics)
        losses = torch.where(self._has_objective(scores, batch), losses, 0.0)
        if self.beta != 0.0:
            losses = losses + self.beta * self._divergence(scores, batch, metrics)
        policy = self._sum_and_total(losses, batch)
        if not self.entropy.is_used:
            return {"policy": policy}
        record_term(metrics, "policy_loss", policy, batch)
        if scores.entropies is None:
            raise ValueError("The entropy bonus needs the entropies of the tokens.")
        entropy_sum = masked_sum(scores.entropies, batch.loss_mask)
        if batch.mode == "train":
            self.entropy.observe(entropy_sum, batch.loss_mask.sum())
        bonus = -self.entropy.active * entropy_sum
        return {"policy": policy, "entropy": (bonus, batch.totals.tokens)}

    def _objective(self, scores: TokenScores, batch: Batch, metrics: MetricStore) -> Tensor:
        """Return the losses (B, C) or (B, 1) of `loss_type`, without penalty."""
        ratio = batch.columns["ratio"]
        advantages = batch.columns["advantages"]
        if self.loss_type in CLIPPED:
            return clipped_losses(batch, ratio_mask(batch), self.clip_range, metrics, self.delta)
        if self.loss_type == "cispo":
            is_clipped = (ratio > self.cispo_ratio_max) & (advantages.view(len(batch), -1) > 0)
            metrics.mean(
                "cispo_clip_ratio", (is_clipped & batch.loss_mask).sum(), batch.loss_mask.sum()
            )
            losses = objectives.cispo(ratio, scores.logps, advantages, self.cispo_ratio_max)
            return batch.weighted(losses)
        if self.loss_type == "sapo":
            temperatures = self.sapo_temperature_pos, self.sapo_temperature_neg
            return batch.weighted(objectives.sapo(ratio, advantages, *temperatures))
        return self._vespo(scores, batch, metrics)

    def _vespo(self, scores: TokenScores, batch: Batch, metrics: MetricStore) -> Tensor:
        columns = batch.columns
        mask = batch.loss_mask
        advantages = columns["advantages"]
        log_ratios = objectives.log_ratio(scores.logps, columns["old_logps"], mask, "token")
        if "weights" in columns:  # a factor of the ratio that VESPO's weight is computed from
            log_ratios = log_ratios + torch.where(mask, columns["weights"].log(), 0.0)
        weight = objectives.vespo_weight(
            log_ratios, mask, advantages, self.vespo_pos, self.vespo_neg
        )
        metrics.value("vespo/phi_seq_mean", weight.mean())
        return objectives.vespo(weight, scores.logps, advantages)

    def _has_objective(self, scores: TokenScores, batch: Batch) -> Tensor:
        """Mark the tokens (B, C) whose objective counts; the KL penalty counts for all."""
        columns = batch.columns
        has_objective = batch.loss_mask
        if "objective_mask" in columns:
            has_objective = has_objective & columns["objective_mask"]
        if self.off_policy_mask_threshold is not None:
            is_near = objectives.off_policy_mask(
                scores.logps,
                # The log-probabilities that the engine sampled with, if it reports them.
                columns.get("sampling_logps", columns["old_logps"]),
                columns["advantages"],
                batch.loss_mask,
                self.off_policy_mask_threshold,
            )
            has_objective = has_objective & is_near
        return has_objective

    def _divergence(self, scores: TokenScores, batch: Batch, metrics: MetricStore) -> Tensor:
        """Return the KL penalty (B, C) of tokens, without its weight."""
        mask = batch.loss_mask
        divergence = k3(scores.logps, batch.columns["ref_logps"], mask)
        if self.use_bias_correction_kl:
            divergence = divergence * batch.columns["ratio"]
        metrics.mean("kl", masked_sum(divergence, mask), mask.sum())
        return divergence

    def _sum_and_total(self, losses: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Add up the losses (B, C) of tokens, and choose what they are divided by."""
        mask = batch.loss_mask
        totals = batch.totals
        if self.loss_type in ("grpo", "sapo"):  # a completion counts as one, whatever its length
            return masked_mean(losses, mask, dim=1).sum(), totals.rows
        total = {
            "bnpo": totals.micro_batch_tokens,
            "dr_grpo": totals.rows * self.max_completion_length,
            "luspo": totals.rows,
        }.get(self.loss_type, totals.tokens)
        return masked_sum(losses, mask), total
