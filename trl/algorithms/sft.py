"""SFT: the cross-entropy of examples."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import Batch
from ..online.metrics import MetricStore, record_accuracy, record_entropy
from ..ops.masking import masked_sum
from ..types import TokenScores
from .base import Algorithm, LossTerms, Needs


@dataclass(frozen=True, kw_only=True)
class SFT(Algorithm[TokenScores]):
    """Cross-entropy of the tokens in the loss, averaged over all tokens of an optimizer step."""

    # "nll", or "dft": each term is multiplied by the probability of its token, without gradient.
    loss_type: str = "nll"

    @property
    def needs(self) -> Needs:
        """Nothing besides log-probabilities."""
        return Needs()

    def loss(self, scores: TokenScores, batch: Batch, metrics: MetricStore) -> LossTerms:
        """Return the sum over tokens, and record entropy, accuracy and losses by origin."""
        losses = -scores.logps
        if self.loss_type == "dft":
            losses = losses * torch.exp(scores.logps.detach())
        if scores.entropies is not None and scores.hits is not None:
            record_entropy(metrics, scores.entropies.detach(), batch.loss_mask)
            record_accuracy(metrics, scores.hits, batch.loss_mask)
        self._record_origins(losses.detach(), batch, metrics)
        return {"nll": (masked_sum(losses, batch.loss_mask), batch.totals.tokens)}

    def _record_origins(self, losses: Tensor, batch: Batch, metrics: MetricStore) -> None:
        """Record the mean loss (B, C) of the rows of each named dataset of a mixture."""
        origins = [group.origin for group in batch.groups for _ in group.branches]
        for name in sorted(set(origins) - {""}):
            is_of_origin = torch.tensor([[origin == name] for origin in origins])
            mask = batch.loss_mask & is_of_origin.to(losses.device, non_blocking=True)
            metrics.mean(f"loss/{name}", masked_sum(losses, mask), mask.sum())
