"""Common prefixes and padding of ragged rows, and statistics that skip masked or NaN entries."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Dim = int | tuple[int, ...] | None


def common_prefix_length(ids: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the longest common prefix of two sequences of the same type."""
    low = 0
    high = min(len(ids), len(other))
    # Bisection: comparing slices is many times faster than comparing single items.
    while low < high:
        middle = (low + high + 1) // 2
        if ids[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """Mark the first `lengths[i]` of `width` positions of every row: (B, W) bool."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def pad_ragged(
    rows: Sequence[Sequence[float]],
    value: float | bool,
    *,
    side: Literal["right", "left"] = "right",
    width: int | None = None,
    multiple: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Pad B rows of different lengths, which may be 0, to one tensor (B, W).

    `value` is the padding, on the `side` "right" or "left". W is `width`, by default the length of
    the longest row, rounded up to a multiple of `multiple`. `dtype` follows `value` by default:
    int64, float32 or bool. A row longer than `width`, or another side, raises a ValueError.
    """
    if side not in ("right", "left"):
        raise ValueError(f"side must be 'right' or 'left', not {side!r}.")
    longest = max(map(len, rows), default=0)
    if width is None:
        width = longest
    if width < longest:
        index = [len(row) for row in rows].index(longest)
        raise ValueError(f"Row {index} has {longest} entries: width={width} must be >= {longest}.")
    if multiple:
        width = -(-width // multiple) * multiple
    padded = torch.full((len(rows), width), value, dtype=dtype)
    for target, row in zip(padded, rows, strict=True):
        start = width - len(row) if side == "left" else 0
        target[start : start + len(row)] = torch.as_tensor(row, dtype=padded.dtype)
    return padded


def masked_sum(values: Tensor, mask: Tensor, dim: Dim = None) -> Tensor:
    """Sum the values at the marked positions; other values, NaN included, are never read.

    Shapes broadcast. The gradient of an excluded value is 0.
    """
    # A product with the mask would turn NaN and inf at excluded positions into NaN.
    return torch.where(mask, values, values.new_zeros(())).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: Dim = None) -> Tensor:
    """Average the values at the marked positions; 0 if none is marked. Shapes broadcast."""
    values, mask = torch.broadcast_tensors(values, mask)
    return masked_sum(values, mask, dim) / mask.sum(dim).clamp(min=1)


def nan_mean(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Mean of the entries that are not NaN; NaN where there are none."""
    return torch.nanmean(x, dim=dim, keepdim=keepdim)


def nan_std(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Standard deviation (Bessel's correction) of the entries that are not NaN.

    It is exactly 0 for a single entry or equal entries, and NaN for no entries.
    """
    # After subtracting the minimum, equal entries are exactly 0, and so is their mean.
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
