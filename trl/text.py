"""Words that several messages and tables share. Imports the standard library alone."""

import difflib
import math
import re
from collections.abc import Iterable
from typing import Any


def did_you_mean(
    name: str, legal: Iterable[str], otherwise: str = "", closeness: float = 0.6
) -> str:
    """Name the legal value closest to a mistaken one: " Did you mean X?", or say `otherwise`."""
    close = difflib.get_close_matches(name, list(legal), n=1, cutoff=closeness)
    return f" Did you mean {close[0]}?" if close else otherwise


def split_names(text: str) -> list[str]:
    """The names in a text such as "q_proj, v_proj"; one entry for any other text."""
    is_list = re.fullmatch(r"[\w.\s,]+", text)
    return [name for name in re.split(r"[\s,]+", text) if name] if is_list else [text]


def count(number: int, noun: str, plural: str = "") -> str:
    """Name a number of things: "1 row", "2 rows"; by default the plural is the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def three_digits(value: float | None) -> str:
    """Write a metric with three significant digits, such as 0.500, 57.3 or 1.20e-05.

    Numbers from a thousand to a million are whole; "-" stands for None and NaN.
    """
    if value is None or math.isnan(value):
        return "-"
    if 999.5 <= abs(value) < 999_999.5:
        return f"{value:.0f}"
    return f"{value or 0.0:#.3g}".rstrip(".")


def fixed(value: float, digits: int) -> str:
    """Write a number with so many digits behind the point, and zero without a sign."""
    text = f"{value:.{digits}f}"
    return text if float(text) else text.removeprefix("-")


def size(count: float) -> str:
    """Write bytes with three digits and a decimal unit: 0, 4.2 kB, 83.1 MB, 1.76 GB."""
    if not count:
        return "0"
    for unit, bytes_of_unit in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if abs(count) < 999.5 * bytes_of_unit:
            return f"{count / bytes_of_unit:.3g} {unit}"
    return f"{count / 1e12:.3g} TB"


def as_text(value: Any) -> str:
    """Render a prompt or completion, a string or messages, as text for a person."""
    if isinstance(value, str):
        return value
    return "\n".join(_line(message) for message in value)


def _line(message: dict[str, Any]) -> str:
    functions = [call.get("function", call) for call in message.get("tool_calls") or []]
    calls = [f"{function.get('name')}({function.get('arguments')})" for function in functions]
    return " ".join([f"{message['role']}: {message.get('content')}", *calls])
