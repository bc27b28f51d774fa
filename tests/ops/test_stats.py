import math
import statistics

import pytest
import torch

from trl.ops.stats import nan_mean, nan_min, nan_std

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
