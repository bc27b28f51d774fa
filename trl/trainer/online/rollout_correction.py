"""The mismatch between trainer and engine: measured, bounded, and corrected in the loss."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.utils import logging

from ...distributed import Ranks
from ...online.guard import FiniteGuard
from ...online.metrics import MetricStore, record_ratio, record_sampling
from ...ops.masking import masked_sum
from ...ops.policy_losses import RatioBounds, RatioLevel, scale_gradient
from ...ops.support import Support
from ...types import Rollout, Sampling, TokenScores
from .online_config import OnlineConfig

logger = logging.get_logger(__name__)

# Options of engines that change probabilities by what was generated before, or by a grammar.
NOT_REPLAYED = (
    *("presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
    *("structured_outputs", "min_tokens", "thinking_token_budget", "watermarking", "extra_args"),
)


class MismatchError(RuntimeError):
    """The engine draws from another distribution than the one that is trained."""


def not_replayed(sampling: Sampling) -> list[str]:
    """The options of `sampling` whose effect on probabilities the trainer does not compute."""
    extra = sampling.extra
    found = [f"{name}={extra[name]!r:.60}" for name in NOT_REPLAYED if extra.get(name)]
    if sampling.repetition_penalty != 1.0:
        found.append(f"repetition_penalty={sampling.repetition_penalty}")
    if not extra.get("do_sample", True):
        found.append("do_sample=False")
    return found


@dataclass
class RolloutCorrection:
    """Compares the log-probabilities of trainer and engine, and weights the loss by their ratio.

    Those of the trainer are of the weights that generated; on-policy, of the forward that trains.
    The filters of the engine are replayed, so rounding and differences of implementation are left.
    """

    args: OnlineConfig  # mode, bounds and action
    sampling: Sampling  # how the engine draws
    guard: FiniteGuard  # is shown each weight
    ranks: Ranks  # which decide together
    by_token: bool = False  # losses are of tokens, even where the ratio is of completions
    _seen: list[Tensor] = field(default_factory=list)  # sums of gaps, and how many

    def __post_init__(self) -> None:
        support = Support(self.sampling.top_p, self.sampling.top_k, self.sampling.min_p or 0.0)
        self.support = None if support.is_whole else support
        names = ("mode", "clip_min", "clip_max")
        bounds = [getattr(self.args, f"vllm_importance_sampling_{name}") for name in names]
        self._bounds = RatioBounds(*bounds)
        self._corrects = self.args.vllm_importance_sampling_correction
        self._unknown = ", ".join(not_replayed(self.sampling))
        if self._unknown and self.args.vllm_max_logp_gap is not None:
            raise ValueError(
                f"vllm_max_logp_gap={self.args.vllm_max_logp_gap} cannot be used with "
                f"{self._unknown}: the trainer does not replay what that does to probabilities."
            )

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
            self._seen.append(torch.stack([masked_sum((logps - drawn).abs(), mask), mask.sum()]))
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
                f"The trainer does not replay what {self._unknown} does to the probabilities of "
                "the engine. So the loss is not corrected (vllm_importance_sampling_correction has "
                "no effect), and the metrics sampling/* include it."
            )
        return self._corrects

    def forget(self) -> None:
        """Drop the gaps of an update that begins anew."""
        self._seen.clear()

    def check(self, step: int) -> None:
        """Compare the mean gap since the last check with its bound; every rank must call this."""
        bound = self.args.vllm_max_logp_gap
        if bound is None:
            return
        none = torch.zeros(2, device=self.args.device)
        total, count = self.ranks.sum(torch.stack([none, *self._seen]).sum(0)).tolist()
        self.forget()
        gap = total / max(count, 1.0)
        if gap <= bound:
            return
        words = (
            f"Step {step}: log-probabilities of trainer and engine differ by {gap:.3g} nats a "
            f"token on average, more than vllm_max_logp_gap={bound:g}."
        )
        if self.args.vllm_logp_gap_action == "raise":
            raise MismatchError(
                f"{words} Look for other precisions or old weights, raise the bound, or set "
                "vllm_logp_gap_action='warn'."
            )
        if self.ranks.rank == 0:
            logger.warning(words)


def _scored(batch: Rollout) -> Tensor:
    """Mark the trained-on tokens (B, C) whose log-probability under the trainer is known."""
    if batch.old_logps is not None or batch.has_gradient is None:
        return batch.loss_mask
    rows = torch.tensor(batch.has_gradient, device=batch.loss_mask.device)
    return batch.loss_mask & rows[:, None]
