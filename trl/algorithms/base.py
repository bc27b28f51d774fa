"""The interface between an algorithm and the training loop, and losses that several share.

An algorithm has no trainer and no model inside, so a test makes one and calls it. Letters in shapes
are as in `trl.batch`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from ..batch import Batch, Step
from ..distributed import Ranks
from ..online.metrics import MetricStore, record_clipping
from ..ops.logit_statistics import LogitStatistic
from ..ops.policy_losses import RatioLevel, clip_flags, clipped_surrogate

Scores = TypeVar("Scores")  # what a scorer computes with gradient: `TokenScores`, or a tensor

# The sum () of a term over a batch, and its total () over the optimizer step, on all ranks, by
# which the loop divides.
LossTerm = tuple[Tensor, Tensor]
LossTerms = Mapping[str, LossTerm]  # by name; terms are added


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What must be computed for an algorithm besides the log-probabilities that it trains."""

    old_logps: bool = False  # before credit; otherwise the forward that trains computes them
    ref_logps: bool = False
    values: bool = False  # (B, C) in `values`; the trainer must override `value_reader`
    entropies: bool = False  # with gradient, for the loss; otherwise only where they are logged
    credit_entropies: bool = False  # before credit
    statistic: LogitStatistic | None = None  # of the logits, for the loss
    logged_statistic: LogitStatistic | None = None  # where metrics are logged, if no other is read
    ratio: RatioLevel | None = None  # to the old policy; None: the loss has no ratio
    # Losses are of tokens, even where a completion has one ratio. Correction weights that are
    # of tokens then multiply these losses, and do not scale the gradient of the ratio.
    token_losses: bool = False
    whole_groups: bool = False  # the loss compares the branches of a group
    # All of the loss is a multiple of the advantage: rows whose advantages are 0 may be left out.
    only_advantages: bool = False


class Algorithm(Generic[Scores]):
    """The methods that the training loop calls; subclasses are dataclasses of their options."""

    state_fields: ClassVar[tuple[str, ...]] = ()  # those of its fields that are no options

    @property
    def needs(self) -> Needs:
        """What must be computed for it; all but `whole_groups` may change between steps."""
        raise NotImplementedError

    def credit(self, step: Step, metrics: MetricStore) -> Step:
        """Add columns that depend on all rows of a step, or of a rollout batch.

        All ranks call this, once, after the columns without gradient were computed. A rollout batch
        must get `advantages`, (B,) or (B, C): they are reported, and rows of which all are 0 may be
        left out of the loss. It has no totals yet, but the batches of a dataset have them.
        """
        return step

    def loss(self, scores: Scores, batch: Batch, metrics: MetricStore) -> LossTerms:
        """Return the loss terms of a batch, which may be a chunk of a micro-batch."""
        raise NotImplementedError

    def predictions(self, scores: Scores, batch: Batch) -> Mapping[str, Tensor]:
        """Return values (G, K) of branches by name, which `predict` collects by dataset row."""
        return {}

    def discard_update(self) -> None:
        """Discard what the chunks of an update left, because it is computed again or dropped.

        Trainers with rollouts call this after out-of-memory, and when an update is dropped. Nothing
        calls it when an update begins, so `end_update` must clear what it has read.
        """

    def end_update(self, ranks: Ranks, metrics: MetricStore) -> bool:
        """Finish an update: all ranks call this after its backward, before the optimizer steps.

        Trainers with rollouts only. An evaluation batch is finished like an update.
        Returns whether the rest of the rollout batch is dropped, because the policy moved too far.
        """
        return False


def divide(term: LossTerm) -> Tensor:
    """Divide the sum () of a batch by the total () of its step; 0 where the total is 0.

    A total may be below 1, if a rollout batch serves several steps.
    """
    term_sum, total = term
    return term_sum / torch.where(total > 0, total, 1.0)


def record_term(metrics: MetricStore, name: str, term: LossTerm, batch: Batch) -> None:
    """Record the mean of a term over optimizer steps, which all count the same."""
    value = divide(term).detach()
    share_of_rows = len(batch) / batch.totals.all_rows
    is_missing = value.isnan()
    metrics.mean(
        name, value.masked_fill(is_missing, 0.0), share_of_rows.masked_fill(is_missing, 0.0)
    )


def clipped_losses(
    batch: Batch,
    mask: Tensor,
    clip_range: tuple[float, float],
    metrics: MetricStore,
    delta: float | None = None,
) -> Tensor:
    """Return the weighted clipped surrogate (B, C) or (B, 1), and record how much is clipped.

    The ratio of the batch is clipped to [1 - clip_range[0], 1 + clip_range[1]]; `delta` bounds the
    unclipped ratio from above. `mask` marks the entries that count in the metrics.
    """
    ratio = batch.columns["ratio"]
    advantages = batch.columns["advantages"]
    too_low, too_high = clip_flags(ratio, advantages, *clip_range)
    record_clipping(metrics, too_low, too_high, mask)
    return batch.weighted(clipped_surrogate(ratio, advantages, *clip_range, delta))


def ratio_mask(batch: Batch) -> Tensor:
    """Mark what has a ratio: tokens in the loss (B, C), or completions with such a token (B, 1)."""
    if batch.columns["ratio"].shape[1] > 1:
        return batch.loss_mask
    return batch.loss_mask.any(1, keepdim=True)


def with_changed_options(algorithm: Algorithm[Scores], fresh: Algorithm[Scores]) -> Any:
    """Return an algorithm with its own state, and the options of a fresh one of the same class."""
    if not is_dataclass(algorithm) or type(fresh) is not type(algorithm):
        return algorithm
    changed = {}
    for option in fields(algorithm):
        value = getattr(fresh, option.name)
        is_option = option.init and option.name not in algorithm.state_fields
        if is_option and value != getattr(algorithm, option.name):
            changed[option.name] = value
    return replace(algorithm, **changed) if changed else algorithm
