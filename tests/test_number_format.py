import math

import pytest

from trl.number_format import format_bytes, format_fixed, format_metric, pluralize


def test_numbers_of_things():
    assert [pluralize(n, "row") for n in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert (pluralize(1, "entry", "entries"), pluralize(1234, "entry", "entries")) == (
        "1 entry",
        "1,234 entries",
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0.0, "0.00"), (-0.0, "0.00"), (0.5, "0.500"), (-0.25, "-0.250"), (57.26, "57.3")),
        *((123.4, "123"), (999.6, "1000"), (12345.6, "12346"), (1234567.0, "1.23e+06")),
        *((0.00123, "0.00123"), (1e-6, "1.00e-06"), (5, "5.00"), (math.inf, "inf")),
        *((None, "-"), (math.nan, "-")),
    ],
)
def test_metrics_have_format_metric(value, text):
    assert format_metric(value) == text


def test_zero_has_no_sign():
    values = [0.0, -0.0, -0.0004, 0.0004, -0.0006, -1.0]
    assert [format_fixed(x, 3) for x in values] == ["0.000"] * 4 + ["-0.001", "-1.000"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0"), (999, "0.999 kB"), (1234, "1.23 kB"), (999_600, "1 MB")),
        *((83_100_000, "83.1 MB"), (999_600_000, "1 GB"), (1.76e9, "1.76 GB")),
        *((123.4e9, "123 GB"), (2.5e12, "2.5 TB"), (-5e6, "-5 MB")),
    ],
)
def test_sizes(count, text):
    assert format_bytes(count) == text
