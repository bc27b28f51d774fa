"""What DPO and KTO share: log-ratios of answers to a reference, and metrics for both sides."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..batch import Batch
from ..online.metrics import MetricStore
from ..ops.masking import masked_sum
from ..types import TokenScores
from .base import Algorithm


class PreferenceAlgorithm(Algorithm[TokenScores]):
    """Compares a policy with a reference on answers to prompts.

    The log-probability of an answer is the sum of those of its tokens. A log-ratio is the
    log-probability under the policy minus that under the reference.
    """

    beta: float  # how strongly the policy is held near the reference
    has_reference: bool = True  # False: all answers are equally likely under the reference

    def answer_logps(self, logps: Tensor, batch: Batch) -> Tensor:
        """Return log-probabilities of answers (B,) from those of their tokens (B, C)."""
        return logps.sum(1)

    def ref_answer_logps(self, batch: Batch) -> Tensor:
        """Return log-probabilities of answers (B,) under the reference."""
        if not self.has_reference:
            return torch.zeros(len(batch), device=batch.loss_mask.device)
        if "ref_answer_logps" in batch.columns:
            return batch.columns["ref_answer_logps"]
        return self.answer_logps(batch.columns["ref_logps"], batch)

    def log_ratios(self, scores: TokenScores, batch: Batch) -> Tensor:
        """Return log-ratios of answers (B,)."""
        return self.answer_logps(scores.logps, batch) - self.ref_answer_logps(batch)

    def predictions(self, scores: TokenScores, batch: Batch) -> Mapping[str, Tensor]:
        """Return implied rewards and log-probabilities of answers (G, K)."""
        rewards = self.beta * self.log_ratios(scores, batch)
        logps = self.answer_logps(scores.logps, batch)
        return {"rewards": batch.by_group(rewards), "logps": batch.by_group(logps)}

    def record_sides(
        self,
        scores: TokenScores,
        ratios: Tensor,
        sides: Mapping[str, Tensor],
        batch: Batch,
        metrics: MetricStore,
    ) -> None:
        """Record means over the answers of each side: implied rewards, logps and mean logits.

        `ratios` are log-ratios (B,); `sides` say which answers (B,) are chosen, and which rejected.
        """
        rewards = self.beta * ratios.detach()
        logps = self.answer_logps(scores.logps.detach(), batch)
        for side, mask in sides.items():
            metrics.mean(f"rewards/{side}", masked_sum(rewards, mask), mask.sum())
            metrics.mean(f"logps/{side}", masked_sum(logps, mask), mask.sum())
            if scores.mean_logit is not None:
                tokens = batch.loss_mask & mask[:, None]
                logits = masked_sum(scores.mean_logit, tokens)
                metrics.mean(f"logits/{side}", logits, tokens.sum())
