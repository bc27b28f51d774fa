"""Statistics of next-token logits over the whole vocabulary, without gradient."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trl.ops.logprobs import BLOCK_ELEMENTS


class LogitStatistic(ABC):
    """One number for each next-token distribution, computed a block of rows at a time."""

    name: ClassVar[str]  # of the field of `TokenScores` that holds it

    @torch.no_grad()
    def compute(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the statistic (M,) of each row, in float32 at least; NaN where logits are NaN.

        Logits are (M, V), already divided by the temperature; ids (M,) are the sampled tokens.
        """
        wide = torch.promote_types(logits.dtype, torch.float32)
        result = logits.new_zeros(len(logits), dtype=wide)
        step = max(1, BLOCK_ELEMENTS // logits.shape[-1])
        for start in range(0, len(logits), step):
            rows = slice(start, start + step)
            result[rows] = self._of_block(logits[rows].to(wide), ids[rows])
        return result

    @abstractmethod
    def _of_block(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the statistic (m,) of logits (m, V)."""


@dataclass(frozen=True)
class Support(LogitStatistic):
    """Log-probability mass of the tokens that a sampler's filters keep.

    Filters are those of vLLM, in its order: min-p; then the `top_k` most likely tokens, ties
    included; then, after renormalizing, the most likely tokens that reach a mass of `top_p`.

    A log-probability over the whole vocabulary minus this mass is the log-probability with which
    the filtered sampler draws the token. The mass is at most 0. The sampled token always counts as
    kept: if rounding puts it outside, its probability is added, so the result stays finite.
    """

    name = "log_mass"

    top_p: float = 1.0  # above 0; 1 or more keeps all tokens
    top_k: int = 0  # 0 or less keeps all tokens
    min_p: float = 0.0  # tokens below this fraction of the largest probability are dropped

    @property
    def is_whole(self) -> bool:
        """Whether nothing is filtered."""
        return self.top_p >= 1.0 and self.top_k <= 0 and self.min_p <= 0.0

    def _of_block(self, logits: Tensor, ids: Tensor) -> Tensor:
        chosen = logits.gather(1, ids[:, None]).squeeze(1)
        filtered = self._filtered(logits)
        least = filtered.masked_fill(filtered == -torch.inf, torch.inf).amin(1)
        mass = filtered.logsumexp(1)
        mass = torch.where(chosen < least, torch.logaddexp(mass, chosen), mass)
        return (mass - logits.logsumexp(1)).clamp(max=0.0)

    def _filtered(self, logits: Tensor) -> Tensor:
        """Return the logits, in any order, with those of dropped tokens replaced by -inf."""
        if self.min_p > 0.0:
            bound = logits.amax(1, keepdim=True) + math.log(self.min_p)
            logits = logits.masked_fill(logits < bound, -torch.inf)
        if 0 < self.top_k < logits.shape[1]:
            bound = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < bound, -torch.inf)
        if self.top_p < 1.0:
            # Some of several equal logits at the edge may stay, so the order does not matter.
            logits = logits.sort(1).values
            dropped = logits.softmax(1).cumsum(1) <= 1.0 - self.top_p
            dropped[:, -1] = False
            logits = logits.masked_fill(dropped, -torch.inf)
        return logits


class Collision(LogitStatistic):
    """Log-probability that two independent samples are the same token: log(sum of p^2)."""

    name = "log_collision"

    def _of_block(self, logits: Tensor, ids: Tensor) -> Tensor:
        return (2 * logits).logsumexp(1) - 2 * logits.logsumexp(1)


class MeanLogit(LogitStatistic):
    """Mean of the logits over the vocabulary."""

    name = "mean_logit"

    def _of_block(self, logits: Tensor, ids: Tensor) -> Tensor:
        return logits.mean(1)
