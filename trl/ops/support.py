"""The mass of the tokens that sampling filters leave to draw from."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trl.ops.logprobs import BLOCK_ELEMENTS


@dataclass(frozen=True)
class Support:
    """The tokens from which a sampler draws: the filters of vLLM, in its order.

    Min-p first; of what it leaves, the `top_k` most likely tokens, with all that are as likely as
    the last of them; of these, with their probabilities renormalized, the most likely ones that
    reach the mass `top_p` together.
    """

    top_p: float = 1.0  # above 0; 1 and more keep all
    top_k: int = 0  # 0 and less keep all
    min_p: float = 0.0  # share of the largest probability below which tokens are dropped

    @property
    def is_whole(self) -> bool:
        """Whether nothing is filtered."""
        return self.top_p >= 1.0 and self.top_k <= 0 and self.min_p <= 0.0

    @torch.no_grad()
    def log_mass(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Logarithm of the probability of the support, under softmax(logits).

        Subtracted from a log-probability over the whole vocabulary, it gives the one with which a
        filtered sampler draws the token. The token itself always counts as part of the support,
        since it was drawn: where rounding puts it outside, the result is finite all the same.

        Logits are (M, V), already divided by the temperature, and ids (M,) the tokens drawn. The
        result is (M,), at most 0, NaN where logits are, and has no gradient.
        """
        wide = torch.promote_types(logits.dtype, torch.float32)
        result = logits.new_zeros(len(logits), dtype=wide)
        step = max(1, BLOCK_ELEMENTS // logits.shape[-1])
        for start in range(0, len(logits), step):
            rows = slice(start, start + step)
            result[rows] = self._log_mass(logits[rows].to(wide), ids[rows])
        return result

    def _log_mass(self, logits: Tensor, ids: Tensor) -> Tensor:
        chosen = logits.gather(1, ids[:, None]).squeeze(1)
        kept = self._kept(logits)
        least = kept.masked_fill(kept == -torch.inf, torch.inf).amin(1)
        mass = kept.logsumexp(1)
        mass = torch.where(chosen < least, torch.logaddexp(mass, chosen), mass)
        return (mass - logits.logsumexp(1)).clamp(max=0.0)

    def _kept(self, logits: Tensor) -> Tensor:
        """Logits in any order, with -inf in place of those that are dropped."""
        kept = logits
        if self.min_p > 0.0:
            bound = kept.amax(1, keepdim=True) + math.log(self.min_p)
            kept = kept.masked_fill(kept < bound, -torch.inf)
        if 0 < self.top_k < kept.shape[1]:
            bound = kept.topk(self.top_k).values[:, -1:]
            kept = kept.masked_fill(kept < bound, -torch.inf)
        if self.top_p < 1.0:
            # Of several equal tokens at the edge some may stay, so values are dropped, not places.
            kept = kept.sort(1).values
            dropped = kept.softmax(1).cumsum(1) <= 1.0 - self.top_p
            dropped[:, -1] = False
            kept = kept.masked_fill(dropped, -torch.inf)
        return kept


class Collision(Support):
    """Instead of a mass, the probability that two draws give the same token: log(sum of p^2)."""

    def _log_mass(self, logits: Tensor, ids: Tensor) -> Tensor:
        return (2 * logits).logsumexp(1) - 2 * logits.logsumexp(1)


class MeanLogit(Support):
    """Instead of a mass, the mean over the vocabulary of the logits."""

    def _log_mass(self, logits: Tensor, ids: Tensor) -> Tensor:
        return logits.mean(1)
