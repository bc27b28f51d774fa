"""Which tokens have a high entropy (Wang et al., "Beyond the 80/20 Rule", arXiv 2506.01939)."""

import torch
from torch import Tensor


def entropy_threshold(entropies: Tensor, top_quantile: float) -> Tensor:
    """Entropy that the given share of the tokens reaches: their (1 - top_quantile) quantile.

    Args:
        entropies (`Tensor`): (n,) entropies of the trained-on tokens of all ranks.
        top_quantile (`float`): share of tokens to keep, in [0, 1].

    Returns:
        `Tensor`: (); linear between the two nearest entries, and inf if there are none.

    Raises:
        ValueError: if `top_quantile` is not in [0, 1].
    """
    if not 0 <= top_quantile <= 1:
        raise ValueError(f"top_quantile must be between 0 and 1, got {top_quantile}.")
    if len(entropies) == 0:
        return entropies.new_tensor(torch.inf)
    # torch.quantile refuses more than 2**24 entries.
    ordered = entropies.sort().values
    position = (1 - top_quantile) * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return torch.lerp(ordered[below], ordered[above], position - below)


def high_entropy_mask(entropies: Tensor, mask: Tensor, threshold: Tensor | float) -> Tensor:
    """Mark the tokens of `mask` whose entropy is at least `threshold`.

    Args:
        entropies (`Tensor`): (B, C).
        mask (`Tensor`): (B, C) bool.
        threshold (`Tensor` or `float`): a scalar, as `entropy_threshold` returns it.

    Returns:
        `Tensor`: (B, C) bool.
    """
    return mask & (entropies >= threshold)
