"""Configuration fields: help, choices, types and ranges stand once, for all who need them."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import typing
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any

from ...text import did_you_mean

HOLDS = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}
WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
KINDS = {int: "an integer", float: "a number", bool: "True or False"}
KINDS |= {str: "text", list: "a list"}
MAPPING = "a dictionary, or a JSON object such as '{\"a\": 1}'"


def option(
    default: Any,
    help_text: str,
    choices: tuple[str, ...] | None = None,
    hint: str = "",
    **bounds: float,
) -> Any:
    """Declare a dataclass field of a configuration; a list is copied for each instance.

    `hint` is what else a message about a value out of range says; `bounds` are those of a number:
    `ge`, `gt`, `le`, `lt`, such as `gt=0, le=1`.
    """
    metadata: dict[str, Any] = {"help": help_text}
    if choices is not None:
        metadata["choices"] = list(choices)
    if unknown := set(bounds) - set(HOLDS):
        raise TypeError(f"Unknown bounds: {', '.join(unknown)}.")
    if bounds:
        metadata["bounds"] = {kind: bounds[kind] for kind in HOLDS if kind in bounds}
    metadata |= {"hint": hint} if hint else {}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_options(config: Any, inherited: Mapping[str, Mapping[str, float]] | None = None) -> None:
    """Check all values of a dataclass against types, choices and ranges of its options.

    None is legal where the annotation of the option says so. `inherited` are bounds, by name, of
    options that another package declares. An error names option, value and what is legal.
    """
    others, kinds = inherited or {}, kinds_of(config.__class__)
    for field in dataclasses.fields(config):
        value, known = getattr(config, field.name, None), field.metadata
        if value is None and (type(None) in kinds[field.name] or "bounds" not in known):
            continue
        problem = _not_whole(value, known, kinds[field.name])
        problem = problem or _problem(value, known, others.get(field.name), kinds[field.name])
        if problem is not None:
            raise ValueError(f"{field.name}={value!r} must be {problem}")


def _problem(value: Any, known: Mapping[str, Any], inherited: Any, kinds: list[Any]) -> str | None:
    if "bounds" in known or inherited:
        return _out_of_range(value, known.get("bounds", inherited), known.get("hint", ""))
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]
    if "choices" in known or enums:
        choices = known.get("choices") or [x.value for x in enums[0]]
        hint = did_you_mean(str(value), choices)
        return None if value in choices else f"one of {', '.join(choices)}.{hint}"
    return _wrong_kind(value, kinds)


def _out_of_range(value: Any, bounds: Mapping[str, float], hint: str = "") -> str | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and all(HOLDS[kind](value, bound) for kind, bound in bounds.items()):
        return None
    legal = " and ".join(f"{WORDS[kind]} {bound:g}" for kind, bound in bounds.items())
    return f"{'' if is_number else 'a number, '}{legal}{f' ({hint})' if hint else ''}."


def _not_whole(value: Any, known: Mapping[str, Any], kinds: list[Any]) -> str | None:
    if not isinstance(value, float) or int not in kinds or float in kinds:
        return None
    beyond = _out_of_range(value, known.get("bounds", {}), known.get("hint", ""))
    nearest = f"; the nearest is {value:.0f}" if math.isfinite(value) else ""
    return f"an integer, {beyond}" if beyond else f"an integer{nearest}."


def changed(config: Any, names: Iterable[str]) -> str:
    """Those of some options of a dataclass that do not have their default value."""
    defaults = type(config).__dataclass_fields__
    return ", ".join(name for name in names if getattr(config, name) != defaults[name].default)


@cache
def kinds_of(config_class: Any) -> dict[str, list[Any]]:
    """The types that the options of a dataclass may have."""
    unions = {
        name: typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
        for name, hint in typing.get_type_hints(config_class).items()
    }
    return {name: [typing.get_origin(x) or x for x in found] for name, found in unions.items()}


def _wrong_kind(value: Any, kinds: list[Any]) -> str | None:
    """Text would be true where it says false, and be taken apart into letters for a list."""
    if dict in kinds:
        no_mapping = isinstance(from_json(value), str | list | int | float)
        is_legal = not no_mapping or Path(str(value)).is_file()
        return None if is_legal else f"{MAPPING}."
    is_number = isinstance(value, (int, float)) and value is not False
    legal = {str} if isinstance(value, str) else {int, float, bool} if is_number else {*kinds}
    is_legal = not legal.isdisjoint(kinds)
    words = [KINDS[kind] for kind in kinds if kind in KINDS]
    return None if is_legal or not words else f"{' or '.join(words)}."


def from_json(value: Any) -> Any:
    """What JSON text stands for; anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return value
