"""DPO: the policy learns which of two answers is preferred, without a reward model."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..batch import Batch, Columns, Step
from ..online.metrics import MetricStore, record_accuracy, record_entropy
from ..ops.logit_statistics import Collision, MeanLogit
from ..ops.masking import masked_sum
from ..ops.preference_losses import (
    AOT_LOSSES,
    PAIR_LOSSES,
    PairOptions,
    PairScores,
    aot_partners,
    shared_length_weights,
)
from ..types import TokenScores
from .base import LossTerms, Needs
from .preferences import PreferenceAlgorithm


@dataclass(frozen=True, kw_only=True)
class DPO(PreferenceAlgorithm):
    """Losses of pairs, averaged over the pairs of an optimizer step (arXiv 2305.18290).

    A group is a pair: its first branch is the chosen answer, its second the rejected one. The loss
    "sft" is the negative log-likelihood of chosen answers, averaged over their tokens.
    """

    # Weight of each loss: keys of `PAIR_LOSSES`, and "sft".
    losses: Mapping[str, float] = field(default_factory=lambda: {"sigmoid": 1.0})
    beta: float = 0.1
    options: PairOptions = PairOptions()  # of the losses, with the same beta
    ld_alpha: float | None = None  # weight of tokens beyond the shorter answer's length; None: 1
    use_weighting: bool = False  # weight pairs by how likely their answers are (WPO)
    has_reference: bool = True

    @property
    def needs(self) -> Needs:
        """The reference; for aot losses, log-probabilities before the update."""
        return Needs(
            old_logps=bool(self._aot_losses),
            ref_logps=self.has_reference,
            statistic=Collision() if self.use_weighting else None,
            logged_statistic=MeanLogit(),
            whole_groups=True,
        )

    @property
    def _aot_losses(self) -> list[str]:
        """Losses that compare an answer with answers of other pairs of the step."""
        return [name for name in self.losses if name in AOT_LOSSES]

    def answer_logps(self, logps: Tensor, batch: Batch) -> Tensor:
        """Return log-probabilities of answers (B,); tokens may weigh `ld_alpha`."""
        if self.ld_alpha is not None:
            lengths = batch.by_group(batch.lengths)
            logps = logps * shared_length_weights(
                lengths=lengths.flatten(),
                counterparts=lengths.flip(1).flatten(),
                width=logps.shape[1],
                alpha=self.ld_alpha,
            )
        return logps.sum(1)

    def credit(self, step: Step, metrics: MetricStore) -> Step:
        """For aot losses, choose the answer of the step that each answer is compared with."""
        if not self._aot_losses:
            return step
        local = torch.cat([self._old_and_reference(batch) for batch in step.batches]).cpu()
        local = local[_is_real(step)]
        all_ranks = step.ranks.gather_objects(local)
        first = sum(len(pairs) for pairs in all_ranks[: step.ranks.rank])
        policy, reference = torch.cat(all_ranks).unbind(1)
        for name in self._aot_losses:
            partners = aot_partners(name, policy, reference)[first : first + len(local)]
            step = _with_partners(name, partners, step)
        return step

    def _old_and_reference(self, batch: Batch) -> Tensor:
        """Return log-probabilities (G, 2, 2): [policy, reference] by [chosen, rejected]."""
        policy = batch.by_group(self.answer_logps(batch.columns["old_logps"], batch))
        reference = batch.by_group(self.ref_answer_logps(batch))
        return torch.stack([policy, reference], 1)

    def loss(self, scores: TokenScores, batch: Batch, metrics: MetricStore) -> LossTerms:
        """Return the sum over pairs, and that over the tokens of chosen answers."""
        ratios = self.log_ratios(scores, batch)
        losses = self._pair_losses(ratios, batch)
        if self.use_weighting:
            losses = losses * _wpo_weights(scores, batch)
        self._record(scores, ratios.detach(), batch, metrics)
        terms = {"pairs": (masked_sum(losses, batch.group_mask), batch.totals.groups)}
        if weight := self.losses.get("sft"):
            logps = masked_sum(scores.logps.sum(1), batch.branch_mask(0))
            terms["sft"] = (-weight * logps, batch.totals.first_tokens)
        return terms

    def _pair_losses(self, ratios: Tensor, batch: Batch) -> Tensor:
        """Losses of pairs (G,) from log-ratios (B,)."""
        chosen, rejected = batch.by_group(ratios).unbind(1)
        chosen_lengths, rejected_lengths = batch.by_group(batch.lengths).unbind(1)
        losses = torch.zeros_like(chosen)
        for name, weight in self.losses.items():
            if name == "sft":
                continue
            chosen_partners = rejected_partners = None
            if name in AOT_LOSSES:
                partners = batch.columns["aot_logps" if name == "aot" else "aot_unpaired_logps"]
                chosen_partners, rejected_partners = batch.by_group(partners).unbind(1)
            pairs = PairScores(
                chosen=chosen,
                rejected=rejected,
                chosen_lengths=chosen_lengths,
                rejected_lengths=rejected_lengths,
                chosen_partners=chosen_partners,
                rejected_partners=rejected_partners,
            )
            losses = losses + weight * PAIR_LOSSES[name](pairs, self.options)
        return losses

    def _record(
        self, scores: TokenScores, ratios: Tensor, batch: Batch, metrics: MetricStore
    ) -> None:
        sides = {"chosen": batch.branch_mask(0), "rejected": batch.branch_mask(1)}
        self.record_sides(scores, ratios, sides, batch, metrics)
        chosen, rejected = batch.by_group(self.beta * ratios).unbind(1)
        margins = chosen - rejected
        mask = batch.group_mask
        metrics.mean("rewards/margins", masked_sum(margins, mask), mask.sum())
        metrics.mean("rewards/accuracies", ((margins > 0) & mask).sum(), mask.sum())
        metrics.mean("rewards/ties", ((margins == 0) & mask).sum(), mask.sum())
        if scores.entropies is not None and scores.hits is not None:
            record_entropy(metrics, scores.entropies.detach(), batch.loss_mask)
            chosen_tokens = batch.loss_mask & sides["chosen"][:, None]
            record_accuracy(metrics, scores.hits, chosen_tokens)


def _is_real(step: Step) -> Tensor:
    """Mark the pairs of all batches of a step that are no fillers: (G,) bool, on the CPU."""
    groups = [group for batch in step.batches for group in batch.groups]
    return torch.tensor([not group.is_filler for group in groups])


def _with_partners(name: str, partners: Tensor, step: Step) -> Step:
    """Add the partners (P, 2) of P real pairs as a column of the batches; fillers have 0."""
    is_real = _is_real(step)
    all_partners = partners.new_zeros(len(is_real), 2)
    all_partners[is_real] = partners
    sizes = [len(batch.groups) for batch in step.batches]
    batches = []
    for batch, batch_partners in zip(step.batches, all_partners.split(sizes), strict=True):
        column = batch_partners.flatten().to(batch.loss_mask.device, non_blocking=True)
        is_aot = name == "aot"
        columns = Columns(aot_logps=column) if is_aot else Columns(aot_unpaired_logps=column)
        batches.append(batch.with_columns(**columns))
    return step.with_batches(batches)


def _wpo_weights(scores: TokenScores, batch: Batch) -> Tensor:
    """Return weights of pairs (G,): how likely answers are compared with samples of the policy.

    See WPO (arXiv 2406.11827).
    """
    if scores.log_collision is None:
        raise ValueError("use_weighting=True needs `log_collision`: see `needs`.")
    relative = (scores.logps.detach() - scores.log_collision).sum(1)
    return batch.by_group(relative / batch.lengths.clamp(min=1)).sum(1).exp()
