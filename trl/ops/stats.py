"""Statistics of the entries that are not NaN."""

import torch
from torch import Tensor

from trl.ops.masking import Dim


def nan_mean(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Mean of the entries that are not NaN; NaN where there are none."""
    return torch.nanmean(x, dim=dim, keepdim=keepdim)


def nan_std(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Standard deviation (Bessel's correction) of the entries that are not NaN.

    A single entry has deviation 0, and so, exactly, have equal entries; none give NaN.
    """
    # Measured from the minimum, equal entries are exactly 0 whatever their mean rounds to.
    shifted = x - nan_min(x, dim, keepdim=True)
    squares = (shifted - nan_mean(shifted, dim, keepdim=True)).square()
    count = (~x.isnan()).sum(dim, keepdim=keepdim)
    variance = squares.nansum(dim, keepdim=keepdim) / (count - 1).clamp(min=1)
    return variance.sqrt().masked_fill(count == 0, torch.nan)


def nan_min(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Smallest entry that is not NaN; NaN where there are none."""
    if x.numel() == 0:
        return nan_mean(x, dim, keepdim)
    absent = x.isnan()
    smallest = x.masked_fill(absent, torch.inf).amin(() if dim is None else dim, keepdim=keepdim)
    return smallest.masked_fill(absent.all(dim, keepdim=keepdim), torch.nan)
