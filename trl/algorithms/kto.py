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


@dataclass(frozen=True, kw_only=True, eq=False)
class AnswerRatios:
    """What is left of a scored batch for the losses of its answers: numbers of rows (B,)."""

    own: Tensor  # log-ratios
    mismatched: Tensor  # log-ratio of another answer behind the same prompt
    label: Tensor  # bool
    mask: Tensor  # bool: answers in the loss, neither mismatched ones nor fillers


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
        return mean_ratio(ratios, torch.cat([batch.branch_mask(0) for batch in batches]), ranks)

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
        losses = self.losses(
            self.log_ratios(scores, batch), batch.columns["label"], batch.columns["kl"]
        )
        return {"kto": (masked_sum(losses, batch.branch_mask(0)), batch.totals.groups)}

    def losses(self, ratios: Tensor, label: Tensor, kl: Tensor) -> Tensor:
        """Return the weighted losses (B,) of answers with log-ratios (B,) and labels (B,)."""
        weights = torch.where(label, self.desirable_weight, self.undesirable_weight)
        return weights * kto_loss(ratios, label, kl, self.beta)

    def answer_ratios(self, scores: TokenScores, batch: Batch) -> AnswerRatios:
        """Keep what the losses of a batch of both answers need, but nothing of single tokens."""
        logps = scores.logps[batch.branch_rows(1)]
        batch = self.with_mismatched_ratios(batch, batch.select_branch(1), logps)
        return AnswerRatios(
            own=self.log_ratios(scores, batch),
            mismatched=batch.columns["mismatched_ratios"],
            label=batch.columns["label"],
            mask=batch.branch_mask(0),
        )

    def losses_of_evaluation(
        self, evaluated: Sequence[AnswerRatios], ranks: Ranks
    ) -> tuple[list[Tensor], Tensor]:
        """Return the sum () of the losses of each batch, and the KL estimate () over all of them.

        The estimate is over all ranks.
        """
        mismatched = torch.cat([answers.mismatched for answers in evaluated])
        kl = mean_ratio(mismatched, torch.cat([answers.mask for answers in evaluated]), ranks)
        sums = [
            masked_sum(self.losses(answers.own, answers.label, kl), answers.mask)
            for answers in evaluated
        ]
        return sums, kl

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


def mean_ratio(ratios: Tensor, mask: Tensor, ranks: Ranks) -> Tensor:
    """Return the mean () of the log-ratios (B,) that the mask marks, on all ranks; at least 0."""
    sums = torch.stack([masked_sum(ratios, mask), mask.sum()])
    total, count = ranks.sum(sums).unbind()
    return (total / count.clamp(min=1)).clamp(min=0)
