"""Which tokens have a high entropy (Wang et al., "Beyond the 80/20 Rule", arXiv 2506.01939)."""

import torch
from torch import Tensor


def entropy_threshold(entropies: Tensor, top_quantile: float) -> Tensor:
    """Return the (1 - top_quantile) quantile () of the entropies: the top share reaches it.

    `entropies` (n,) are those of the loss tokens of all ranks; -inf marks padding. The quantile is
    interpolated linearly, and inf if there are no tokens. A `top_quantile` outside [0, 1] raises a
    ValueError.
    """
    if not 0 <= top_quantile <= 1:
        raise ValueError(f"top_quantile must be between 0 and 1, got {top_quantile}.")
    if len(entropies) == 0:
        return entropies.new_tensor(torch.inf)
    # torch.quantile refuses more than 2**24 entries. Padding sorts to the front; its number is
    # counted on the device, so the host does not wait.
    ordered = entropies.sort().values
    count = (ordered != -torch.inf).sum()
    position = (1 - top_quantile) * (count - 1).clamp(min=0).double()
    below = position.long()
    positions = torch.stack([below, (below + 1).minimum(count - 1)]) + len(ordered) - count
    low, high = ordered[positions.clamp(max=len(ordered) - 1)]
    threshold = torch.lerp(low, high, (position - below).to(ordered.dtype))
    return threshold.masked_fill(count == 0, torch.inf)


def high_entropy_mask(entropies: Tensor, mask: Tensor, threshold: Tensor | float) -> Tensor:
    """Mark the tokens of `mask` (B, C) whose entropy is at least `threshold`."""
    return mask & (entropies >= threshold)
