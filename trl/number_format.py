"""Format numbers for messages and tables. Imports the standard library alone."""

import math


def pluralize(number: int, noun: str, plural: str = "") -> str:
    """Write a number with its noun: "1 row", "2 rows". The default plural adds an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_metric(value: float | None) -> str:
    """Write a metric with three significant digits, such as 0.500, 57.3 or 1.20e-05.

    Numbers from a thousand to a million are rounded to integers. None and NaN become "-".
    """
    if value is None or math.isnan(value):
        return "-"
    if 999.5 <= abs(value) < 999_999.5:
        return f"{value:.0f}"
    return f"{value or 0.0:#.3g}".rstrip(".")


def format_fixed(value: float, digits: int) -> str:
    """Write a number with `digits` decimals. A number that rounds to zero has no minus sign."""
    text = f"{value:.{digits}f}"
    return text if float(text) else text.removeprefix("-")


def format_bytes(byte_count: float) -> str:
    """Write a number of bytes with three digits and a decimal unit: 0, 4.2 kB, 83.1 MB, 1.76 GB."""
    if not byte_count:
        return "0"
    for unit, bytes_per_unit in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if abs(byte_count) < 999.5 * bytes_per_unit:
            return f"{byte_count / bytes_per_unit:.3g} {unit}"
    return f"{byte_count / 1e12:.3g} TB"
