import math
import statistics

import pytest
import torch

from trl.ops.masking import (
    length_mask,
    masked_mean,
    masked_sum,
    nan_mean,
    nan_min,
    nan_std,
    pad_ragged,
)

NAN, INF = torch.nan, torch.inf


def test_length_mask_marks_the_first_places():
    mask = length_mask(torch.tensor([0, 2, 3]), 3)
    assert mask.dtype is torch.bool
    assert mask.tolist() == [[False] * 3, [True, True, False], [True] * 3]


@pytest.mark.parametrize(
    ("side", "expected"),
    [("right", [[1, 2, 9], [9, 9, 9], [3, 4, 5]]), ("left", [[9, 1, 2], [9, 9, 9], [3, 4, 5]])],
)
def test_pad_ragged_fills_one_side(side, expected):
    padded = pad_ragged([[1, 2], [], [3, 4, 5]], 9, side=side)
    assert padded.dtype is torch.int64
    assert padded.tolist() == expected


@pytest.mark.parametrize(
    ("width", "multiple", "columns"),
    [(None, None, 3), (5, None, 5), (None, 4, 4), (5, 4, 8), (None, 3, 3), (3, None, 3)],
)
def test_pad_ragged_width(width, multiple, columns):
    padded = pad_ragged([[1], [1, 2, 3]], 0, width=width, multiple=multiple)
    assert padded.shape == (2, columns)
    assert padded.sum(1).tolist() == [1, 6]


def test_pad_ragged_dtype_follows_the_fill_value_unless_given():
    rows = [[1, 0], [1]]
    assert pad_ragged(rows, 0.0).dtype is torch.float32
    assert pad_ragged(rows, False).tolist() == [[True, False], [True, False]]
    assert pad_ragged(rows, 0.0, dtype=torch.float64).dtype is torch.float64


def test_pad_ragged_of_nothing_is_an_empty_rectangle():
    assert pad_ragged([], 0).shape == (0, 0)
    assert pad_ragged([[], []], 0).shape == (2, 0)


def test_pad_ragged_names_the_row_that_does_not_fit():
    with pytest.raises(ValueError, match=r"Row 1 has 3 entries.*width=2 must be >= 3"):
        pad_ragged([[1], [1, 2, 3]], 0, width=2)


def test_pad_ragged_names_the_legal_sides():
    with pytest.raises(ValueError, match="'right' or 'left', not 'top'"):
        pad_ragged([[1]], 0, side="top")


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30])
def test_what_is_masked_reaches_neither_sum_nor_mean_nor_gradient(junk):
    values = torch.tensor([[1.0, junk, 4.0], [junk, junk, junk]], dtype=torch.float64)
    values.requires_grad_()
    mask = torch.tensor([[True, False, True], [False] * 3])
    assert masked_sum(values, mask).item() == 5.0
    assert masked_sum(values, mask, dim=1).tolist() == [5.0, 0.0]
    assert masked_sum(values, mask, dim=0).tolist() == [1.0, 0.0, 4.0]
    assert masked_mean(values, mask).item() == 2.5
    means = masked_mean(values, mask, dim=1)
    assert means.tolist() == [2.5, 0.0]
    means.sum().backward()
    assert values.grad.tolist() == [[0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]


def test_a_value_per_row_counts_once_for_each_marked_token():
    values = torch.tensor([[2.0], [5.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert masked_mean(values, mask).item() == 3.0
    assert masked_mean(values, mask, dim=1).tolist() == [2.0, 5.0]


NAN = torch.nan
TABLE = [[1.0, NAN, -3.0, 2.5], [NAN, NAN, NAN, NAN], [NAN, 7.0, NAN, NAN], [4.0, 4.0, 4.0, 4.0]]


def deviation(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


SLOW = {nan_mean: statistics.fmean, nan_std: deviation, nan_min: min}


def slow(function, values):
    present = [value for value in values if not math.isnan(value)]
    return SLOW[function](present) if present else NAN


@pytest.mark.parametrize("function", SLOW)
def test_statistics_of_what_is_present(function):
    table = torch.tensor(TABLE, dtype=torch.float64)
    every = [value for row in TABLE for value in row]
    columns = zip(*TABLE, strict=True)
    found = [
        (function(table), torch.tensor(slow(function, every))),
        (function(table, dim=1), torch.tensor([slow(function, row) for row in TABLE])),
        (function(table, dim=0), torch.tensor([slow(function, column) for column in columns])),
    ]
    for ours, expected in found:
        torch.testing.assert_close(
            ours, expected.double(), rtol=1e-7, atol=0, equal_nan=True, check_dtype=False
        )


@pytest.mark.parametrize("function", SLOW)
def test_keepdim_keeps_a_dimension_to_broadcast_with(function):
    table = torch.tensor(TABLE)
    assert function(table, dim=1, keepdim=True).shape == (4, 1)
    assert function(table, keepdim=True).shape == (1, 1)
    torch.testing.assert_close(
        function(table, 1, True)[:, 0], function(table, 1), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("function", SLOW)
@pytest.mark.parametrize("values", [[], [NAN], [NAN, NAN]])
def test_nothing_present_gives_nan(function, values):
    assert function(torch.tensor(values)).isnan()


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.1, -7.7])
@pytest.mark.parametrize("count", [2, 3, 7, 8])
def test_equal_values_have_no_deviation_at_all(value, count):
    assert nan_std(torch.full((count,), value)).item() == 0.0
