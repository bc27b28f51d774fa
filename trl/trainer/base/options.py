"""Checking the values of options against their types, choices and bounds."""

import dataclasses
import json
import math
import typing
from collections.abc import Mapping, Sequence
from enum import EnumType
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Protocol

from ...options import COMPARISONS
from ...suggestions import did_you_mean

BOUND_TEXTS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
TYPE_TEXTS = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "text",
    list: "a list",
}
MAPPING = "a dictionary, or a JSON object such as '{\"a\": 1}'"
Bounds = Mapping[str, float]  # such as {"ge": 0, "lt": 1}


class DataclassInstance(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


def check_options(
    config: DataclassInstance, inherited_bounds: Mapping[str, Bounds] | None = None
) -> None:
    """Check the values of a dataclass; raise a ValueError for the first that is not legal.

    Args:
        config: a dataclass whose fields were declared by `option`, or inherited.
        inherited_bounds: bounds of options that were declared without any, by name.
    """
    types_by_name = option_types(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        types = types_by_name[field.name]
        declared_bounds: Bounds = field.metadata.get("bounds") or {}
        is_restricted = bool(declared_bounds) or "choices" in field.metadata
        if value is None and (type(None) in types or not is_restricted):
            continue
        bounds = declared_bounds or (inherited_bounds or {}).get(field.name, {})
        requirement = _unmet_requirement(value, types, bounds, field.metadata)
        if requirement is not None:
            raise ValueError(f"{field.name}={value!r} must be {requirement}")


def _unmet_requirement(
    value: object, types: Sequence[Any], bounds: Bounds, metadata: Mapping[str, Any]
) -> str | None:
    """Return what the value of an option must be, or None if it is that."""
    needs_integer = int in types and float not in types
    if bounds or (needs_integer and isinstance(value, float)):
        return _unmet_bounds(value, bounds, metadata.get("hint", ""), needs_integer)
    choices = _legal_choices(types, metadata)
    if choices is not None:
        if value in choices:
            return None
        return f"one of {', '.join(choices)}.{did_you_mean(str(value), choices)}"
    return _unmet_type(value, types)


def _legal_choices(types: Sequence[Any], metadata: Mapping[str, Any]) -> Sequence[str] | None:
    """Return the legal values of an option: its choices, or those of an enumeration; else None."""
    choices: Sequence[str] | None = metadata.get("choices")
    enumerations: list[Any] = [
        option_type for option_type in types if isinstance(option_type, EnumType)
    ]
    if choices is None and enumerations:
        return [member.value for member in enumerations[0]]
    return choices


def _unmet_bounds(value: object, bounds: Bounds, hint: str, needs_integer: bool) -> str | None:
    """Return which numbers are legal, or None if `value` is one of them."""
    legal = " and ".join(f"{BOUND_TEXTS[name]} {bound:g}" for name, bound in bounds.items())
    if not isinstance(value, int | float) or isinstance(value, bool):
        return f"a number, {legal}{hint}."
    is_legal = all(COMPARISONS[name](value, bound) for name, bound in bounds.items())
    if needs_integer and isinstance(value, float):
        if not is_legal:
            return f"an integer, {legal}{hint}."
        nearest = f"; the nearest is {value:.0f}" if math.isfinite(value) else ""
        return f"an integer{nearest}."
    return None if is_legal else f"{legal}{hint}."


@cache
def option_types(config_class: type) -> dict[str, list[Any]]:
    """Return the types that each option of a dataclass may have, without their type arguments."""
    types_by_name: dict[str, list[Any]] = {}
    for name, hint in typing.get_type_hints(config_class).items():
        members: Sequence[Any] = typing.get_args(hint) if isinstance(hint, UnionType) else [hint]
        types_by_name[name] = [typing.get_origin(member) or member for member in members]
    return types_by_name


def _unmet_type(value: object, types: Sequence[Any]) -> str | None:
    """Return which types are legal, or None if the type of `value` is.

    Without this check, the text "false" would count as true, and a text given for a list would be
    split into letters.
    """
    if dict in types:
        return _unmet_mapping(value)
    if isinstance(value, str):
        accepting_types: set[type] = {str}
    elif isinstance(value, int | float) and value is not False:
        accepting_types = {int, float, bool}
    else:
        return None
    if not accepting_types.isdisjoint(types):
        return None
    names = [TYPE_TEXTS[option_type] for option_type in types if option_type in TYPE_TEXTS]
    return f"{' or '.join(names)}." if names else None


def _unmet_mapping(value: object) -> str | None:
    """Return that a dictionary is needed, or None if `value` is one, as JSON text or in a file."""
    is_mapping = not isinstance(from_json(value), str | list | int | float)
    if is_mapping or Path(str(value)).is_file():
        return None
    missing = " There is no such file." if str(value).endswith(".json") else ""
    return f"{MAPPING}.{missing}"


def from_json(value: object) -> Any:
    """Parse JSON text; return anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
