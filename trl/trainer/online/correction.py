"""Correction for engines that draw with other probabilities than the policy's."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.utils import logging

from ...algorithms.base import Needs
from ...batch import Batch
from ...distributed import Ranks
from ...generation.base import Sampling
from ...online.guard import FiniteGuard
from ...online.metrics import MetricStore, record_ratio, record_sampling
from ...ops.logit_statistics import Support
from ...ops.masking import masked_sum
from ...ops.policy_losses import RatioBounds, importance_ratio, scale_gradient
from ...types import TokenScores
from .online_config import OnlineConfig

logger = logging.get_logger(__name__)


class MismatchError(RuntimeError):
    """The engine draws from another distribution than the one that is trained."""


@dataclass(frozen=True, kw_only=True)
class CorrectionOptions:
    """How losses are corrected, and how far engine and trainer may be apart."""

    bounds: RatioBounds
    is_wanted: bool = True  # weight losses by the ratio of trainer to engine probabilities
    max_logp_gap: float | None = None  # largest mean difference in nats; None: no bound
    gap_action: str = "raise"  # beyond that bound: "raise" or "warn"

    @classmethod
    def of(cls, args: OnlineConfig) -> "CorrectionOptions":
        """Read the options of a run."""
        return cls(
            bounds=RatioBounds(
                mode=args.vllm_importance_sampling_mode,
                low=args.vllm_importance_sampling_clip_min,
                high=args.vllm_importance_sampling_clip_max,
            ),
            is_wanted=args.vllm_importance_sampling_correction,
            max_logp_gap=args.vllm_max_logp_gap,
            gap_action=args.vllm_logp_gap_action,
        )


@dataclass(kw_only=True)
class EngineCorrection:
    """Compares the log-probabilities of an engine with the policy's, and weights the loss by them.

    The policy's are those of the weights that generated; on-policy, those of the forward that
    trains. The filters of the engine are replayed, so what is left is rounding and differences of
    implementation.
    """

    options: CorrectionOptions
    sampling: Sampling  # how the engine draws
    guard: FiniteGuard  # is shown all weights
    ranks: Ranks
    # Sums of differences and numbers of tokens of the chunks of an update.
    _gaps: list[Tensor] = field(default_factory=list, init=False)
    _has_warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._unknown = ", ".join(self.sampling.unreproducible_options())
        if self._unknown and self.options.max_logp_gap is not None:
            raise ValueError(
                f"vllm_max_logp_gap={self.options.max_logp_gap} cannot be used with "
                f"{self._unknown}: the trainer cannot reproduce its effect on probabilities."
            )

    @property
    def support(self) -> Support | None:
        """The filters of the engine, None if it draws from the whole vocabulary."""
        sampling = self.sampling
        support = Support(sampling.top_p, sampling.top_k, sampling.min_p or 0.0)
        return None if support.is_whole else support

    def discard_update(self) -> None:
        """Discard the chunks of an update that is computed again or dropped."""
        self._gaps.clear()

    def __call__(
        self, scores: TokenScores, batch: Batch, needs: Needs, metrics: MetricStore
    ) -> Batch:
        """Add the old log-probabilities, the ratio to them, and the weights of losses, to a chunk.

        If the chunk has `sampling_logps`, they are replaced by what they would be if the engine
        drew from the whole vocabulary.
        """
        before, logps = batch, scores.logps
        batch = with_old_logps(batch, scores)
        if "sampling_logps" in batch.columns:
            mask = _scored_tokens(before)
            batch = self._compare(batch, mask, metrics)
            weights = self._weights(batch, mask, metrics)
            if weights is not None and self._scales_gradient(needs):
                logps = scale_gradient(logps, weights)
            elif weights is not None:
                batch = batch.with_columns(weights=weights)
        if needs.ratio is None:
            return batch
        old_logps = batch.columns["old_logps"]
        ratio = importance_ratio(logps, old_logps, batch.loss_mask, needs.ratio)
        return batch.with_columns(ratio=ratio)

    def _scales_gradient(self, needs: Needs) -> bool:
        """Whether weights are of tokens, but losses of completions.

        Then no token has a loss that could be multiplied: tokens add different shares to the
        gradient of the ratio instead.
        """
        has_token_losses = needs.ratio in (None, "token") or needs.token_losses
        return self.options.bounds.level == "token" and not has_token_losses

    def _compare(self, batch: Batch, mask: Tensor, metrics: MetricStore) -> Batch:
        """Record how far engine and trainer are apart."""
        logps, reported = batch.columns["old_logps"], batch.columns["sampling_logps"]
        log_mass = batch.columns.get("log_mass")
        drawn = reported if log_mass is None else reported + log_mass
        record_sampling(metrics, logps - reported, logps - drawn, log_mass, mask)
        if self.options.max_logp_gap is not None:
            gap = masked_sum((logps - drawn).abs(), mask)
            self._gaps.append(torch.stack([gap, mask.sum()]))
        return batch.with_columns(sampling_logps=drawn)

    def _weights(self, batch: Batch, mask: Tensor, metrics: MetricStore) -> Tensor | None:
        """Return the weights (B, C) or (B, 1) of losses; None if these are not corrected."""
        bounds, columns = self.options.bounds, batch.columns
        ratio = bounds.ratio(columns["old_logps"], columns["sampling_logps"], mask)
        counted = mask if bounds.level == "token" else mask.any(1, keepdim=True)
        record_ratio(metrics, ratio, bounds.beyond(ratio), counted)
        if not self._applies():
            return None
        weights = bounds.weight(ratio)
        name = "ratio of trainer to engine probabilities"
        self.guard.watch(name, weights, batch.rows, batch.loss_mask)
        return weights

    def _applies(self) -> bool:
        """Whether losses are corrected; warns once if they cannot be."""
        if not self.options.is_wanted or not self._unknown:
            return self.options.is_wanted
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"The trainer cannot reproduce the effect of {self._unknown} on the engine's "
                "probabilities, so the loss is not corrected (vllm_importance_sampling_correction "
                "has no effect), and the metrics sampling/* include this effect."
            )
        return False

    def check(self, step: int, device: torch.device) -> None:
        """Compare the mean gap since the last check with its bound; every rank must call this."""
        bound = self.options.max_logp_gap
        if bound is None:
            return
        none = torch.zeros(2, device=device)
        gap_sum, count = self.ranks.sum(torch.stack([none, *self._gaps]).sum(0)).tolist()
        self._gaps.clear()
        gap = gap_sum / max(count, 1.0)
        if gap <= bound:
            return
        message = (
            f"Step {step}: log-probabilities of trainer and engine differ by {gap:.3g} nats a "
            f"token on average, more than vllm_max_logp_gap={bound:g}."
        )
        if self.options.gap_action == "raise":
            raise MismatchError(
                f"{message} Check for another precision or old weights, raise the bound, or set "
                "vllm_logp_gap_action='warn'."
            )
        if self.ranks.rank == 0:
            logger.warning(message)


def with_old_logps(batch: Batch, scores: TokenScores) -> Batch:
    """Use the detached scores as `old_logps` if there are none.

    On-policy, the weights have not moved since: the ratio is then exactly 1, and its gradient that
    of the log-probability. No rounding of the forward pass can make it differ.
    """
    if "old_logps" in batch.columns:
        return batch
    batch = batch.with_columns(old_logps=scores.logps.detach())
    return batch if scores.log_mass is None else batch.with_columns(log_mass=scores.log_mass)


def _scored_tokens(batch: Batch) -> Tensor:
    """Mark the tokens in the loss (B, C) whose log-probability under the trainer is known."""
    if "old_logps" in batch.columns or "has_gradient" not in batch.columns:
        return batch.loss_mask
    is_scored = batch.columns["has_gradient"].to(batch.loss_mask.device, non_blocking=True)
    return batch.loss_mask & is_scored[:, None]
