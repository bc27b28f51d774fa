"""Declaring options: fields of a configuration with help, choices and ranges."""

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any

HOLDS = {name: getattr(operator, name) for name in ("ge", "gt", "le", "lt")}


class _Metadata(dict[str, Any]):
    """What is known of an option, of which `HfArgumentParser` sees what it hands to argparse."""

    def keys(self) -> Any:
        return [name for name in ("help", "choices") if name in self]


def option(default: Any, text: str, choices: tuple = (), hint: str = "", **bounds: float) -> Any:
    """Declare a dataclass field of a configuration; a list is copied for each instance.

    `bounds` are those of a number, such as `gt=0, le=1`; `hint` ends a message about them.
    """
    metadata = _Metadata(help=text, bounds=bounds, hint=f" ({hint})" if hint else "")
    if choices:
        metadata["choices"] = list(choices)
    if unknown := set(bounds) - set(HOLDS):
        raise TypeError(f"Unknown bounds: {', '.join(unknown)}.")
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def changed(config: Any, names: Iterable[str]) -> str:
    """The options, out of some of a dataclass, that do not have their default value."""
    defaults = type(config).__dataclass_fields__
    return ", ".join(name for name in names if getattr(config, name) != defaults[name].default)
