"""Log-probabilities of rollouts: without gradient before credit, and with gradient for the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ...algorithms.base import Needs
from ...batch import Batch, Step
from ...models.scorer import Reader, Scorer
from ...online.guard import FiniteGuard, NonFiniteError
from ...online.metrics import MetricStore, record_entropy
from ...types import Mode, Rows, TokenScores
from ..base.annotate import Annotator
from .correction import EngineCorrection
from .online_config import OnlineConfig

if TYPE_CHECKING:
    from ...generation.base import PolicyHandle

logger = logging.get_logger(__name__)


@dataclass(kw_only=True)
class RolloutScoring:
    """Scores rollouts, and compares them with what the engine reported."""

    args: OnlineConfig
    policy: PolicyHandle  # what is trained
    scorer: Scorer  # of a few rows
    annotator: Annotator  # of whole rollout batches, without gradient
    correction: EngineCorrection
    guard: FiniteGuard  # is shown all log-probabilities
    autocast: Callable[[], AbstractContextManager[None]]  # the precision of training
    values: Callable[[nn.Module], Reader | None]  # what reads values, if the loss needs them

    def is_on_policy(self, mode: Mode) -> bool:
        """Whether the weights that generate are those that the loss is computed with."""
        return mode == "eval" or self.args.batch_plan.is_on_policy

    def annotate(
        self, step: Step, needs: Needs, is_policys_own: bool, global_step: int
    ) -> tuple[Step, bool]:
        """Add the scores without gradient to a rollout batch, and say whether they are finite.

        `needs` are those of the algorithm; the old log-probabilities are also scored where the
        weights move while the batch is trained on. `is_policys_own`: the log-probabilities that the
        engine reported are those of the policy, so that there is nothing to correct.
        """
        on_policy = self.is_on_policy(step.mode)
        reuses = on_policy and self._reuses_sampling_logps(needs)
        if needs.values or needs.credit_entropies or not on_policy:
            needs = dataclasses.replace(needs, old_logps=True)
        self.agree_on(step.batch.rows)
        if is_policys_own:
            step = step.with_batches([self._take_for_old_logps(step.batch, reuses)])
        # The filters of the engine, if what it reported is to be compared with the policy.
        is_compared = "sampling_logps" in step.batch.columns and not on_policy
        step = self.annotator(
            step,
            needs,
            support=self.correction.support if is_compared else None,
            max_units=self._max_units(step.mode, needs),
        )
        has_scores = needs.old_logps or needs.ref_logps
        return step, not has_scores or self._are_finite(global_step)

    def _are_finite(self, global_step: int) -> bool:
        """Whether all scores of the round are finite on all ranks; if not, stop or warn."""
        try:
            self.guard.check(global_step)
        except NonFiniteError as error:
            if self.args.non_finite == "raise":
                raise
            logger.warning(f"{error} The updates of this round are skipped.")
            return False
        return True

    def _reuses_sampling_logps(self, needs: Needs) -> bool:
        """Whether log-probabilities of generation may serve for the KL penalty in the reward.

        In half precision they differ from those of a pass over the same tokens. The tokens were
        drawn from the former, which thus are higher on average: a penalty on long completions.
        """
        if not needs.old_logps or needs.values or needs.credit_entropies:
            return False
        if self.args.reuse_sampling_logps is None:
            return self.policy.dtype in (torch.float32, torch.float64)
        return self.args.reuse_sampling_logps

    def _take_for_old_logps(self, batch: Batch, reuses: bool) -> Batch:
        """Let the policy's own log-probabilities of generation be the old ones, or drop them."""
        logps = batch.columns.get("sampling_logps")
        if logps is None:
            return batch
        batch = batch.without_columns("sampling_logps")
        # Both sides of a ratio are computed alike, or rounding would look like a policy that moved.
        if not reuses:
            return batch
        self.guard.watch("log-probability of the policy", logps, batch.rows, batch.loss_mask)
        return batch.with_columns(old_logps=logps)

    def _max_units(self, mode: Mode, needs: Needs) -> int:
        rows = self.args.eval_rows if mode == "eval" else self.args.batch_plan.micro_batch
        return rows // self.args.unit if needs.whole_groups else rows

    @torch.no_grad()
    def agree_on(self, rows: Rows) -> None:
        """Let all ranks decide together in which layout rows up to this length are scored."""
        if self.policy.ranks.count > 1:
            self.scorer.agree(self.policy.model, rows, self.policy.ranks.max)

    def row_logps(self, prompt: list[int], completion: list[int]) -> list[float]:
        """Log-probabilities of a completion under the policy; all ranks ask together."""
        rows = Rows.of([(prompt, completion)])
        self.agree_on(rows)
        with self.autocast():
            return self.scorer.logps(self.policy.model, rows)[0].tolist()

    def score(
        self,
        model: nn.Module,
        batch: Batch,
        needs: Needs,
        metrics: MetricStore,
        with_entropies: bool = False,
    ) -> TokenScores:
        """Score the rows of a chunk that have a gradient; the ratio of the others is 1."""
        rows = rows_to_score(batch, self.policy.ranks.is_distributed)
        if not rows:
            return _scores_without_forward(batch, model)
        part = batch if len(rows) == len(batch) else batch.select(rows)
        # If `old_logps` exist, they are compared with the engine; `log_mass` came with them.
        is_compared = "sampling_logps" in batch.columns and "old_logps" not in batch.columns
        scores = self.scorer(
            model,
            part.rows,
            needs.entropies or with_entropies,
            self.correction.support if is_compared else None,
            self.values(model),
        )
        self.guard.watch("log-probability", scores.logps, part.rows, part.loss_mask)
        if scores.entropies is not None:
            record_entropy(metrics, scores.entropies.detach(), part.loss_mask)
        return scores if part is batch else scores.spread(rows, _unmoved_logps(batch))


def rows_to_score(batch: Batch, is_distributed: bool) -> Sequence[int]:
    """Return the rows of a chunk that have a gradient; at least one row if `is_distributed`.

    Every rank runs a forward and a backward pass then, because the others wait for its gradient.
    """
    rows = range(len(batch))
    if "has_gradient" not in batch.columns:
        return rows
    has_gradient = batch.columns["has_gradient"].tolist()
    chosen = [row for row in rows if has_gradient[row]]
    if not chosen and is_distributed:
        lengths = [len(ids) for ids in batch.rows.completion_ids]
        chosen = [lengths.index(min(lengths))]
    return chosen


def _scores_without_forward(batch: Batch, model: nn.Module) -> TokenScores:
    """Scores of a chunk none of whose rows has a gradient.

    Gradients are zero, not absent: the optimizer steps as it does elsewhere.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    zero = torch.stack([weight.flatten()[:1].sum().float() for weight in weights]).sum() * 0.0
    return TokenScores(logps=_unmoved_logps(batch) + zero)


def _unmoved_logps(batch: Batch) -> Tensor:
    """Log-probabilities (B, C) that make the ratio of a row exactly 1."""
    if "old_logps" in batch.columns:
        return batch.columns["old_logps"]
    return torch.zeros(batch.loss_mask.shape, device=batch.loss_mask.device)
