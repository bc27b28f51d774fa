"""Declaring configuration fields: help, choices and range stand once, for all who need them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from enum import Enum
from typing import Any

from ...text import did_you_mean
from ..attributes import kinds_of, wrong_kind

HOLDS = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}
WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def option(
    default: Any,
    help_text: str,
    choices: tuple[str, ...] | None = None,
    hint: str = "",
    **bounds: float,
) -> Any:
    """Declare a dataclass field of a configuration.

    Args:
        default: default value; a list is copied for each instance.
        help_text (`str`): one sentence shown by `--help` and used as documentation.
        choices (`tuple[str, ...]`, *optional*): the values allowed.
        hint (`str`): what else a message about a value out of range says.
        bounds: of a number: `ge`, `gt`, `le`, `lt`, such as `gt=0, le=1`.

    Returns:
        What `dataclasses.field` returns.
    """
    metadata: dict[str, Any] = {"help": help_text}
    if choices is not None:
        metadata["choices"] = list(choices)
    if unknown := set(bounds) - set(HOLDS):
        raise TypeError(f"Unknown bounds: {', '.join(unknown)}.")
    if bounds:
        metadata["bounds"] = {kind: bounds[kind] for kind in HOLDS if kind in bounds}
    if hint:
        metadata["hint"] = hint
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_options(config: Any, inherited: Mapping[str, Mapping[str, float]] | None = None) -> None:
    """Check all values of a configuration against types, choices and ranges of their options.

    None is legal where the annotation of the option says so.

    Args:
        config: a dataclass.
        inherited: name -> bounds of options that another package declares.

    Raises:
        ValueError: naming option, value and the nearest legal values.
    """
    others = inherited or {}
    kinds = kinds_of(type(config))
    for field in dataclasses.fields(config):
        value, known = getattr(config, field.name, None), field.metadata
        if value is None and (type(None) in kinds[field.name] or "bounds" not in known):
            continue
        problem = _problem(value, known, others.get(field.name), kinds[field.name])
        if problem is not None:
            raise ValueError(f"{field.name}={value!r} must be {problem}")


def _problem(
    value: Any, known: Mapping[str, Any], inherited: Mapping[str, float] | None, kinds: list[Any]
) -> str | None:
    if "bounds" in known or inherited:
        return _out_of_range(value, known.get("bounds", inherited), known.get("hint", ""))
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]
    if "choices" in known or enums:
        return _not_chosen(value, known.get("choices") or [x.value for x in enums[0]])
    return wrong_kind(value, kinds)


def _not_chosen(value: Any, choices: list[str]) -> str | None:
    if value in choices:
        return None
    return f"one of {', '.join(choices)}.{did_you_mean(str(value), choices)}"


def _out_of_range(value: Any, bounds: Mapping[str, float], hint: str = "") -> str | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and all(HOLDS[kind](value, bound) for kind, bound in bounds.items()):
        return None
    legal = " and ".join(f"{WORDS[kind]} {bound:g}" for kind, bound in bounds.items())
    kind = "" if is_number else "a number, "
    return f"{kind}{legal}{f' ({hint})' if hint else ''}."
