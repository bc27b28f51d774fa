"""Declare options: dataclass fields of a configuration with help, choices and bounds."""

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any

COMPARISONS = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}


class _Metadata(dict[str, Any]):
    """Field metadata that shows `HfArgumentParser` only the keys that argparse accepts."""

    def keys(self) -> Any:
        return [name for name in ("help", "choices") if name in self]


def option(
    default: Any, help_text: str, choices: tuple = (), hint: str = "", **bounds: float
) -> Any:
    """Declare a dataclass field of a configuration. A default list is copied for each instance.

    Args:
        choices: all legal values; empty if any value of the type is legal.
        hint: advice at the end of the error about a value out of bounds.
        **bounds: bounds of a number, such as `gt=0, le=1`.
    """
    unknown_bounds = set(bounds) - set(COMPARISONS)
    if unknown_bounds:
        raise TypeError(f"Unknown bounds: {', '.join(unknown_bounds)}.")
    metadata = _Metadata(help=help_text, bounds=bounds, hint=f" ({hint})" if hint else "")
    if choices:
        metadata["choices"] = list(choices)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def changed_options(config: object, names: Iterable[str]) -> list[str]:
    """Return those of the named options of a configuration whose value is not the default."""
    fields = type(config).__dataclass_fields__  # type: ignore[attr-defined]
    return [name for name in names if vars(config)[name] != fields[name].default]
