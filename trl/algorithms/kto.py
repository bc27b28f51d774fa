"""KTO: answers that are desirable or not, each on its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import Batch, Step
from ..distributed import Ranks
from ..online.metrics import MetricStore, record_entropy
from ..ops.logit_statistics import MeanLogit
from ..ops.masking import masked_sum
from ..ops.preference_losses import kto_loss
from ..types import TokenScores
from .base import LossTerms, Needs
from .preferences import PreferenceAlgorithm


@dataclass(frozen=True, kw_only=True)
class KTO(PreferenceAlgorithm):
    """Losses of answers with a label, averaged over an optimizer step (arXiv 2402.01306).

    The first branch of a group is its answer. For the KL estimate, a second branch is a mismatched
    answer, of another example. It is not in the loss.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    estimates_kl: bool = True  # False: answers are compared with 0

    @property
    def needs(self) -> Needs:
        """The reference."""
        return Needs(ref_logps=True, logged_statistic=MeanLogit(), whole_groups=True)

    def credit(self, step: Step, metrics: MetricStore) -> Step:
        """Estimate the KL divergence of the step from its `mismatched_ratios`."""
        kl = torch.zeros((), device=step.batches[0].loss_mask.device)
        if self.estimates_kl:
            kl = self.estimate_kl(step.batches, step.ranks)
        return step.with_batches(
            [batch.with_columns(kl=kl.expand(len(batch))) for batch in step.batches]
        )

    def estimate_kl(self, batches: Sequence[Batch], ranks: Ranks) -> Tensor:
        """Estimate the KL divergence (), at least 0: the mean of log-ratios of mismatched answers.

        The mean is over the groups of these batches on all ranks.
        """
        ratios = torch.cat([batch.columns["mismatched_ratios"] for batch in batches])
        masks = torch.cat([batch.branch_mask(0) for batch in batches])
        sums = torch.stack([masked_sum(ratios, masks), masks.sum()])
        total, count = ranks.sum(sums).unbind()
        return (total / count.clamp(min=1)).clamp(min=0)

    def with_mismatched_ratios(self, batch: Batch, mismatched: Batch, logps: Tensor) -> Batch:
        """Add the log-ratio of each group's mismatched answer to a batch, at all of its rows.

        `mismatched` has these answers alone, and `logps` (G, C) are those of their tokens.
        """
        ratios = self.answer_logps(logps.detach(), mismatched) - self.ref_answer_logps(mismatched)
        return batch.with_columns(mismatched_ratios=batch.by_row(ratios))

    def loss(self, scores: TokenScores, batch: Batch, metrics: MetricStore) -> LossTerms:
        """Return the sum over answers; the batch has the column `kl`."""
        self.record(scores, batch, metrics)
        metrics.value("kl", batch.columns["kl"][0])
        return {"kto": (self.sum_of_losses(scores, batch), batch.totals.groups)}

    def sum_of_losses(self, scores: TokenScores, batch: Batch) -> Tensor:
        """Return the sum () of the losses of answers."""
        ratios = self.log_ratios(scores, batch)
        label = batch.columns["label"]
        weights = torch.where(label, self.desirable_weight, self.undesirable_weight)
        losses = weights * kto_loss(ratios, label, batch.columns["kl"], self.beta)
        return masked_sum(losses, batch.branch_mask(0))

    def predictions(self, scores: TokenScores, batch: Batch) -> Mapping[str, Tensor]:
        """Return the implied reward and the log-probability of each answer (G, 1)."""
        values = super().predictions(scores, batch)
        return {name: value[:, :1] for name, value in values.items()}

    def record(self, scores: TokenScores, batch: Batch, metrics: MetricStore) -> None:
        """Record means over desirable answers, as chosen ones, and over undesirable ones."""
        ratios = self.log_ratios(scores, batch).detach()
        mask = batch.branch_mask(0)
        label = batch.columns["label"]
        sides = {"chosen": label & mask, "rejected": ~label & mask}
        self.record_sides(scores, ratios, sides, batch, metrics)
        chosen = masked_sum(self.beta * ratios, sides["chosen"])
        rejected = masked_sum(self.beta * ratios, sides["rejected"])
        num_answers = torch.stack([sides["chosen"].sum(), sides["rejected"].sum()])
        metrics.mean("rewards/margins", torch.stack([chosen, -rejected]), num_answers)
        if scores.entropies is not None:
            record_entropy(metrics, scores.entropies.detach(), batch.loss_mask & mask[:, None])
