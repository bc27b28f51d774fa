"""A rollout: which tokens are trained on, and its log-probabilities, of trainer and engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ...distributed import Ranks
from ...generation.base import Generations, Sampling
from ...memory.adaptive_batch import AdaptiveBatch
from ...models.reference import ReferencePolicy
from ...models.scorer import Reader, Scorer
from ...online.guard import FiniteGuard, NonFiniteError
from ...online.metrics import MetricStore, record_entropy, record_ratio, record_sampling
from ...ops.logit_statistics import Support
from ...ops.masking import length_mask, masked_sum, pad_ragged
from ...ops.policy_losses import RatioBounds, RatioLevel, scale_gradient
from ...types import Mode, Prompts, RewardTable, Rollout, Rows, TokenScores
from .online_config import OnlineConfig

if TYPE_CHECKING:
    from ...generation.base import PolicyHandle

logger = logging.get_logger(__name__)


class MismatchError(RuntimeError):
    """The engine draws from another distribution than the one that is trained."""


def assemble(
    prompts: Prompts, generations: Generations, mode: Mode, args: OnlineConfig, ranks: Ranks
) -> Rollout:
    """Say which tokens are trained on, and count them over all ranks."""
    ids = generations.completion_ids
    lengths = torch.tensor([len(row) for row in ids])
    mask = length_mask(lengths, int(lengths.max()))
    if generations.policy_mask is not None:
        mask = mask & pad_ragged(generations.policy_mask, False, width=mask.shape[1]).bool()
    if args.mask_truncated_completions:
        mask = mask & ~generations.truncated()[:, None]
    mask = mask.to(args.device)
    totals = ranks.sum(torch.stack([mask.sum(), mask.any(1).sum()]))
    if (logps := generations.sampling_logps) is not None:
        logps = pad_ragged(logps, 0.0, dtype=torch.float32).to(args.device)
    return Rollout(
        prefixes=prompts.prefixes,
        completion_ids=ids,
        row_ids=list(range(len(ids))),
        loss_mask=mask,
        num_loss_tokens=totals[0],
        num_loss_rows=totals[1],
        mode=mode,
        num_micro_batches=args.batch_plan.micro_batches if mode == "train" else 1,
        sampling_logps=logps,
    )


def credited(
    table: RewardTable, generations: Generations, args: OnlineConfig, ranks: Ranks
) -> RewardTable:
    """Say which completions of all ranks were cut off; they give no credit if they are masked."""
    cut = ranks.gather(generations.truncated().to(args.device))
    table = dataclasses.replace(table, ended=~cut)
    return table.without(cut) if args.mask_truncated_completions else table


def rows_with_gradient(batch: Rollout, advantages: Tensor) -> list[bool]:
    """Mark the rows whose gradient is not exactly zero, if each term has the advantage in it."""
    return ((advantages != 0).view(len(batch), -1) & batch.loss_mask).any(1).tolist()


@dataclass(kw_only=True)
class Scoring:
    """Computes the log-probabilities that something needs, and compares them with the engine's.

    Those are of the weights that generated; on-policy, of the forward that trains. The filters of
    the engine are replayed, so rounding and differences of implementation are left. The loss is
    weighted by the ratio.
    """

    args: OnlineConfig
    policy: PolicyHandle  # what is trained
    sampling: Sampling  # how the engine draws
    scorer: Scorer  # of a few rows
    reference: ReferencePolicy | None  # of the KL penalty
    guard: FiniteGuard  # is shown all log-probabilities and weights
    batch: AdaptiveBatch  # how many rows are scored at once without gradient
    autocast: Callable[[], AbstractContextManager[None]]  # the precision of training
    values: Callable[[nn.Module], Reader | None]  # what reads values, if credit needs them
    by_token: bool = False  # losses are of tokens, even where the ratio is of completions
    with_entropies: bool = False  # credit compares the entropies of all tokens of a round
    gaps: list[Tensor] = field(default_factory=list)  # sums, and how many, since an update

    def __post_init__(self) -> None:
        support = Support(self.sampling.top_p, self.sampling.top_k, self.sampling.min_p or 0.0)
        self.support = None if support.is_whole else support
        names = ("mode", "clip_min", "clip_max")
        bounds = [getattr(self.args, f"vllm_importance_sampling_{name}") for name in names]
        self._bounds = RatioBounds(*bounds)
        self._corrects = self.args.vllm_importance_sampling_correction
        self._unknown = ", ".join(self.sampling.unreproducible_options())
        if self._unknown and self.args.vllm_max_logp_gap is not None:
            raise ValueError(
                f"vllm_max_logp_gap={self.args.vllm_max_logp_gap} cannot be used with "
                f"{self._unknown}: the trainer cannot reproduce its effect on probabilities."
            )

    def is_on_policy(self, mode: Mode) -> bool:
        """Whether the weights that generated a rollout are those its loss is computed with."""
        return mode == "eval" or self.args.batch_plan.is_on_policy

    def scores_policy(self, mode: Mode) -> bool:
        """Whether log-probabilities under the policy that generated must be known beforehand."""
        needs_values = self.values(self.policy.model) is not None
        needs_others = needs_values or self.with_entropies
        return not self.is_on_policy(mode) or self.args.penalizes_rewards or needs_others

    def score(self, batch: Rollout, step: int) -> tuple[Rollout, bool]:
        """Add old and reference log-probabilities that are needed; say whether all are finite."""
        self.agree_on(batch)
        if self.scores_policy(batch.mode):
            batch = self._with_policy_logps(batch)
            self._watch("log-probability of the policy", batch.old_logps, batch)
        if self.reference is not None:
            with self.reference.active(self.policy.model) as reference:
                scores = self._frozen_scores(reference, batch)
                batch = batch.replace(ref_logps=scores.logps)
            self._watch("log-probability of the reference", batch.ref_logps, batch)
        try:
            if self.scores_policy(batch.mode) or self.reference is not None:
                self.guard.check(step)
        except NonFiniteError as error:
            if self.args.non_finite == "raise":
                raise
            logger.warning(f"{error} The updates of this round are skipped.")
            return batch, False
        return batch, True

    @torch.no_grad()
    def agree_on(self, batch: Rows) -> None:
        """Let all ranks decide together in which layout rows up to this length are scored."""
        if self.policy.ranks.count > 1:
            self.scorer.agree(self.policy.model, batch, self.policy.ranks.max)

    def row_logps(self, prompt: list[int], completion: list[int]) -> list[float]:
        """Log-probabilities of a completion under the policy; all ranks ask together."""
        batch = Rows.of([(prompt, completion)])
        self.agree_on(batch)
        with self.autocast():
            return self.scorer.logps(self.policy.model, batch)[0].tolist()

    def _with_policy_logps(self, batch: Rollout) -> Rollout:
        """Those computed while generating, where only the KL penalty reads them; else a pass."""
        # Both sides of a ratio are computed alike, or rounding would look like a policy that moved.
        on_policy, values = self.is_on_policy(batch.mode), self.values(self.policy.model)
        needs_others = values is not None or self.with_entropies
        reuses = self._reuses_sampling_logps() and not needs_others
        if batch.sampled_by_policy and reuses and on_policy:
            return batch.replace(old_logps=batch.sampling_logps)
        # The filters of the engine, if what it reported is to be compared with the policy.
        support = self.support if batch.has_foreign_logps and not on_policy else None
        model = self.policy.model
        scores = self._frozen_scores(model, batch, support, values, self.with_entropies)
        if scores.values is not None:
            self._watch("value", scores.values, batch)
        return batch.replace(
            old_logps=scores.logps,
            log_mass=scores.log_mass,
            values=scores.values,
            entropies=scores.entropies,
        )

    def _reuses_sampling_logps(self) -> bool:
        """Whether log-probabilities of generation may serve for the KL penalty.

        In half precision they differ from those of a pass over the same tokens. The tokens were
        drawn from the former, which thus are higher on average: a penalty on long completions.
        """
        if self.args.reuse_sampling_logps is None:
            return self.policy.dtype in (torch.float32, torch.float64)
        return self.args.reuse_sampling_logps

    def _frozen_scores(
        self,
        model: nn.Module,
        batch: Rollout,
        support: Support | None = None,
        values: Reader | None = None,
        with_entropy: bool = False,
    ) -> TokenScores:
        args = self.args
        size = args.eval_rows if batch.mode == "eval" else args.batch_plan.micro_batch
        wanted = {
            "logps": True,
            "log_mass": support is not None,
            "values": values is not None,
            "entropies": with_entropy,
        }
        shape, device = batch.loss_mask.shape, self.policy.device
        kept = {name: torch.zeros(shape, device=device) for name, is_so in wanted.items() if is_so}

        def score(rows: range) -> None:
            part = batch.select(rows)
            found = self.scorer.frozen_scores(model, part, support, values, with_entropy)
            place = slice(rows.start, rows.stop), slice(found.logps.shape[1])
            for name, scores in kept.items():
                scores[place] = getattr(found, name)

        with self.autocast():
            self.batch.run(len(batch), score, most=size)
        return TokenScores(**kept)

    def _watch(self, what: str, logps: Tensor | None, batch: Rollout) -> None:
        self.guard.watch(what, torch.as_tensor(logps), batch, batch.loss_mask)

    def current(
        self, model: nn.Module, batch: Rollout, store: MetricStore, with_entropy: bool
    ) -> TokenScores:
        """Score the rows that have a gradient; the others count as not moved."""
        if not (rows := self._rows_to_score(batch)):
            # Their gradient is zero, not absent: the optimizer steps as it does elsewhere.
            trained = [p for p in model.parameters() if p.requires_grad]
            zero = torch.stack([p.flatten()[:1].sum().float() for p in trained]).sum() * 0.0
            return TokenScores(logps=_constant_logps(batch) + zero)
        part = batch if len(rows) == len(batch) else batch.select(rows)
        # What was scored once a round, with the weights that generated, is known by now.
        support = self.support if batch.has_foreign_logps and batch.old_logps is None else None
        scores = self.scorer(model, part, with_entropy, support, self.values(model))
        self._watch("log-probability", scores.logps, part)
        if scores.entropies is not None:
            record_entropy(store, scores.entropies.detach(), part.loss_mask)
        return scores if part is batch else scores.spread(rows, _constant_logps(batch))

    def _rows_to_score(self, batch: Rollout) -> list[int]:
        rows = range(len(batch))
        if batch.has_gradient is None:
            return list(rows)
        chosen = [row for row in rows if batch.has_gradient[row]]
        if not chosen and self.policy.ranks.is_distributed:
            # Every rank runs a forward and a backward pass, for the others wait for its gradient.
            chosen = [min(rows, key=lambda row: len(batch.completion_ids[row]))]
        return chosen

    def correct(
        self, scores: TokenScores, batch: Rollout, level: RatioLevel, store: MetricStore
    ) -> tuple[Rollout, Tensor]:
        """Weight a micro-batch by what its tokens' probabilities are off while it trains.

        `level` is that of the ratio to the policy that generated. Returns the resolved batch for
        the loss, and log-probabilities (B, C) to form the ratio of.
        """
        if not batch.has_foreign_logps:
            return batch.resolved(scores), scores.logps
        mask, batch = _scored(batch), batch.resolved(scores)
        logps, log_mass = torch.as_tensor(batch.old_logps), batch.log_mass
        reported = torch.as_tensor(batch.sampling_logps)
        # As if the engine had drawn from the whole vocabulary.
        drawn = reported if log_mass is None else reported + log_mass
        record_sampling(store, logps - reported, logps - drawn, log_mass, mask)
        if self.args.vllm_max_logp_gap is not None:
            self.gaps.append(torch.stack([masked_sum((logps - drawn).abs(), mask), mask.sum()]))
        ratio = self._bounds.ratio(logps, drawn, mask)
        counted = mask if self._bounds.level == "token" else mask.any(1, keepdim=True)
        record_ratio(store, ratio, self._bounds.beyond(ratio), counted)
        batch = batch.replace(sampling_logps=drawn)
        if not self._is_used():
            return batch, scores.logps
        weights = self._bounds.weight(ratio)
        what = "ratio of trainer to engine probabilities"
        self.guard.watch(what, weights, batch, batch.loss_mask)
        if self._bounds.level == "token" and level != "token" and not self.by_token:
            # A completion has one loss, so no token has one that could be multiplied: its tokens
            # add different shares to the gradient of the ratio instead.
            return batch, scale_gradient(scores.logps, weights)
        return batch.replace(weights=weights), scores.logps

    def _is_used(self) -> bool:
        if self._corrects and self._unknown:
            self._corrects = False
            logger.warning(
                f"The trainer cannot reproduce the effect of {self._unknown} on the engine's "
                "probabilities, so the loss is not corrected (vllm_importance_sampling_correction "
                "has no effect), and the metrics sampling/* include this effect."
            )
        return self._corrects

    def check(self, step: int) -> None:
        """Compare the mean gap since the last check with its bound; every rank must call this."""
        if (bound := self.args.vllm_max_logp_gap) is None:
            return
        none = torch.zeros(2, device=self.args.device)
        total, count = self.policy.ranks.sum(torch.stack([none, *self.gaps]).sum(0)).tolist()
        self.gaps.clear()
        gap = total / max(count, 1.0)
        if gap <= bound:
            return
        words = (
            f"Step {step}: log-probabilities of trainer and engine differ by {gap:.3g} nats a "
            f"token on average, more than vllm_max_logp_gap={bound:g}."
        )
        if self.args.vllm_logp_gap_action == "raise":
            raise MismatchError(
                f"{words} Check for another precision or old weights, raise the bound, or set "
                "vllm_logp_gap_action='warn'."
            )
        if self.policy.ranks.rank == 0:
            logger.warning(words)


def _constant_logps(batch: Rollout) -> Tensor:
    """Log-probabilities (B, C) that make the ratio of a row exactly 1."""
    if batch.old_logps is not None:
        return batch.old_logps
    return torch.zeros(batch.loss_mask.shape, device=batch.loss_mask.device)


def _scored(batch: Rollout) -> Tensor:
    """Mark the trained-on tokens (B, C) whose log-probability under the trainer is known."""
    if batch.old_logps is not None or batch.has_gradient is None:
        return batch.loss_mask
    rows = torch.tensor(batch.has_gradient, device=batch.loss_mask.device)
    return batch.loss_mask & rows[:, None]
