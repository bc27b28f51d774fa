"""The stages that score a rollout: under old policies once a round, then to train."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers.utils import logging

from ...generation.base import GenerationBackend
from ...models.reference import ReferencePolicy
from ...models.scorer import Scorer
from ...online.guard import NonFiniteError
from ...online.statistics import record_entropy
from ...ops.masking import length_mask
from ...ops.policy_losses import RatioLevel
from ...ops.support import Support
from ...types import Rollout, TokenScores
from .online_loop import OnlineLoop
from .rollout_correction import SamplerMismatch

logger = logging.get_logger(__name__)


class OnlineScoring(OnlineLoop):
    """Computes the log-probabilities that something needs, and no others."""

    backend: GenerationBackend
    scorer: Scorer
    mismatch: SamplerMismatch
    reference: ReferencePolicy | None
    router_coefficient: float
    ratio_level: RatioLevel

    # --- What is needed ---

    @property
    def is_on_policy(self) -> bool:
        """Whether the weights that generated a rollout are those its loss is computed with."""
        return not self.model.training or self.args.batch_plan.is_on_policy

    @property
    def needs_old_logps(self) -> bool:
        """Whether log-probabilities under the policy that generated must be known beforehand.

        Off-policy ratios and a KL penalty in the reward need them.
        """
        return not self.is_on_policy or self.args.penalizes_rewards

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss reads entropies."""
        return False

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether a row of zero advantage adds exactly nothing to the gradient, so may be left out.

        That holds while each term of the loss is a multiple of the advantage.
        """
        return bool(self.args.skip_zero_advantages) and self.router_coefficient == 0.0

    # --- Once a round ---

    def score(self, batch: Rollout) -> tuple[Rollout, bool]:
        """Add old and reference log-probabilities, if something needs them.

        Returns:
            The batch, and whether all of them are finite on every rank.
        """
        self.agree_on(batch)
        policy_is_scored = self.needs_old_logps
        if policy_is_scored:
            batch = self._with_policy_logps(batch)
            self.guard.watch(
                "log-probability of the policy", batch.old_logps, batch, batch.loss_mask
            )
        if self.reference is not None:
            with self.reference.active(self.model) as reference:
                batch = batch.replace(ref_logps=self._frozen_scores(reference, batch).logps)
            self.guard.watch(
                "log-probability of the reference", batch.ref_logps, batch, batch.loss_mask
            )
        try:
            if policy_is_scored or self.reference is not None:
                self.guard.check(self.state.global_step)
        except NonFiniteError as error:
            if self.args.non_finite == "raise":
                raise
            logger.warning(f"{error} The updates of this round are skipped.")
            return batch, False
        return batch, True

    @torch.no_grad()
    def agree_on(self, batch: Rollout) -> None:
        """Let all ranks decide together in which layout rows up to this length are scored."""
        if self.ranks.count > 1:
            self.scorer.agree(self.model, batch, self.ranks.largest)

    def row_logps(self, prompt: list[int], completion: list[int]) -> list[float]:
        """Log-probabilities of a completion under the policy; all ranks ask together."""
        mask = length_mask(torch.tensor([len(completion)]), len(completion))
        batch = Rollout(
            prompt_ids=[prompt],
            completion_ids=[completion],
            row_ids=[0],
            loss_mask=mask.to(self.args.device),
            num_loss_tokens=mask.sum(),
            num_loss_rows=mask.any(1).sum(),
        )
        self.agree_on(batch)
        with self.accelerator.autocast():
            return self.scorer.logps(self.model, batch)[0].tolist()

    def _with_policy_logps(self, batch: Rollout) -> Rollout:
        """Those computed while generating, where only the KL penalty reads them; else a pass.

        A ratio of probabilities is formed from the same computation on both sides, so that rounding
        does not look like a policy that has moved.
        """
        known = batch.sampling_logps
        reuses = self.args.reuse_sampling_logps and self.backend.reports_policy_logps
        if known is not None and reuses and self.is_on_policy:
            return batch.replace(old_logps=known)
        filters = None if self.is_on_policy else self._filters(batch)
        scores = self._frozen_scores(self.model, batch, filters)
        return batch.replace(old_logps=scores.logps, log_mass=scores.log_mass)

    def _frozen_scores(
        self, model: nn.Module, batch: Rollout, support: Support | None = None
    ) -> TokenScores:
        """Score without gradient, a few rows at a time."""
        args = self.args
        size = args.per_device_train_batch_size
        if not self.model.training:
            size = args.per_device_eval_batch_size
        logps = torch.zeros(batch.loss_mask.shape, device=args.device)
        log_mass = None if support is None else torch.zeros_like(logps)

        def score(rows: range) -> None:
            found = self.scorer.frozen_scores(model, batch.select(rows), support)
            place = slice(rows.start, rows.stop), slice(found.logps.shape[1])
            logps[place] = found.logps
            if log_mass is not None:
                log_mass[place] = torch.as_tensor(found.log_mass)

        with self.accelerator.autocast():
            self.phases.scoring.run(len(batch), score, most=size)
        return TokenScores(logps=logps, log_mass=log_mass)

    def rows_with_gradient(self, batch: Rollout, advantages: Tensor) -> list[bool] | None:
        """Mark the rows whose gradient is not exactly zero; None if that cannot be said."""
        if not self.skips_zero_advantages:
            return None
        credited = (advantages != 0).view(len(batch), -1) & batch.loss_mask
        return credited.any(1).tolist()

    # --- Every micro-batch ---

    def current_scores(self, model: nn.Module, batch: Rollout) -> TokenScores:
        """Score the rows that have a gradient; the others count as not moved."""
        with_entropy = self.needs_entropy or self.reports_this_step
        rows = self._rows_to_score(batch)
        part = batch if len(rows) == len(batch) else batch.select(rows)
        if not rows:
            return self._no_scores(model, batch)
        # What was scored once a round, with the weights that generated, is known by now.
        support = self._filters(batch) if batch.old_logps is None else None
        scores = self.scorer(model, part, with_entropy, support)
        self.guard.watch("log-probability", scores.logps, part, part.loss_mask)
        if scores.entropies is not None:
            record_entropy(self.store, scores.entropies.detach(), part.loss_mask)
        return scores if part is batch else scores.spread(rows, _constant_logps(batch))

    def _undo_update(self) -> None:
        super()._undo_update()
        self.scorer.forget()
        self.mismatch.forget()

    # --- Mismatch of trainer and engine ---

    def corrected(self, scores: TokenScores, batch: Rollout) -> tuple[Rollout, Tensor]:
        """Weight a micro-batch for an engine that computes other probabilities than the trainer.

        Returns:
            The batch for the loss, and the log-probabilities (B, C) to form its ratio of.
        """
        if not self._is_comparable(batch):
            return batch, scores.logps
        return self.mismatch.correct(scores, batch, self.ratio_level, self.store)

    def _is_comparable(self, batch: Rollout) -> bool:
        return batch.sampling_logps is not None and not self.backend.reports_policy_logps

    def _filters(self, batch: Rollout) -> Support | None:
        """The filters of the engine, if what it reported is to be compared with the policy."""
        return self.mismatch.support if self._is_comparable(batch) else None

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        self.mismatch.check(self.state.global_step + 1)
        return norm

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None, None]:
        """Evaluate one batch, and compare its log-probabilities with those of the engine."""
        found = super().prediction_step(*args, **kwargs)
        self.mismatch.check(self.state.global_step)
        return found

    def _rows_to_score(self, batch: Rollout) -> list[int]:
        rows = range(len(batch))
        if batch.has_gradient is None:
            return list(rows)
        chosen = [row for row in rows if batch.has_gradient[row]]
        if not chosen and self.accelerator.distributed_type != DistributedType.NO:
            # Every rank runs a forward and a backward pass, for the others wait for its gradient.
            chosen = [min(rows, key=lambda row: len(batch.completion_ids[row]))]
        return chosen

    def _no_scores(self, model: nn.Module, batch: Rollout) -> TokenScores:
        """Scores whose gradient is zero, not absent: the optimizer steps as it does elsewhere."""
        trained = [p for p in model.parameters() if p.requires_grad]
        zero = torch.stack([p.flatten()[:1].sum().float() for p in trained]).sum() * 0.0
        return TokenScores(logps=_constant_logps(batch) + zero)


def _constant_logps(batch: Rollout) -> Tensor:
    """Log-probabilities (B, C) that make the ratio of a row exactly 1."""
    if batch.old_logps is not None:
        return batch.old_logps
    return torch.zeros(batch.loss_mask.shape, device=batch.loss_mask.device)
