"""Convert what a user wrote, on the command line or in YAML, to the type of an option.

A type annotation here is anything that may annotate a field: a class, `int | None`, a `Literal`.
"""

import json
import math
import os
import re
import types
import typing
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

BOOLEANS = {
    "true": True,
    "t": True,
    "yes": True,
    "y": True,
    "1": True,
    "on": True,
    "false": False,
    "f": False,
    "no": False,
    "n": False,
    "0": False,
    "off": False,
}
NONE_WORDS = ("none", "null")
NUMBER_NOUNS: dict[object, str] = {int: "an integer", float: "a number"}
# Numbers that YAML 1.1 reads as text, because they have no point or no sign: 1e-5, 1.5e3. Longer
# ones may be names, such as the abbreviated commit 12345e6.
SCIENTIFIC_NUMBER = re.compile(r"[-+]?\d{1,3}(\.\d*)?[eE][-+]?\d{1,2}")


class ConversionError(ValueError):
    """A value does not fit the type of its option."""


class DecisiveError(ConversionError):
    """A value was clearly meant for one type of a union, but is wrong, so no other type is tried.

    For example, text that starts with a brace was meant as JSON.
    """


def union_members(annotation: object) -> tuple[object, ...]:
    """Return the alternatives of a union; of any other annotation, the annotation itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def is_sequence(annotation: object) -> bool:
    """Return whether an option may be given several values."""
    return any(_base(member) in (list, tuple) for member in union_members(annotation))


def is_flag(annotation: object) -> bool:
    """Return whether an option may be given without a value."""
    return bool in union_members(annotation)


def convert(value: object, annotation: object) -> Any:
    """Convert a string, a list of strings or a YAML value to a type, or the best one of a union.

    Raises:
        ConversionError: the value does not fit; the error says why.
    """
    members = union_members(annotation)
    single_value = _unwrap_single(value)
    # If "none" is one of the allowed texts, it is taken as text.
    is_none_word = str(single_value).lower() in NONE_WORDS and str not in members
    if type(None) in members and (single_value is None or is_none_word):
        return None
    errors = []
    for member in sorted(members, key=lambda member: _rank(member, value)):
        if member is type(None):
            continue
        try:
            return _convert_to_member(value, member)
        except DecisiveError:
            raise
        except ConversionError as error:
            errors.append(error)
    raise errors[0]


def _unwrap_single(value: object) -> object:
    """Return the element of a list of one; anything else as it is."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _base(member: object) -> object:
    """Return the generic type of an annotation: `list` for `list[int]`."""
    return typing.get_origin(member) or member


def _rank(member: object, value: object) -> int:
    """Order the members of a union: specific types before text, lists first for several values."""
    base = _base(member)
    if base in (list, tuple):
        has_several_values = isinstance(value, (list, tuple)) and len(value) != 1
        return 0 if has_several_values else 3
    if base in NUMBER_NOUNS:
        return 0
    return 2 if base is str else 1


def _convert_to_member(value: object, member: object) -> Any:
    base = _base(member)
    if base is Any:
        return value
    if value is None:
        raise ConversionError("a value is needed")
    if base in (list, tuple):
        return _to_sequence(value, member)
    value = _unwrap_single(value)
    if base is typing.Literal:
        return _to_choice(value, typing.get_args(member))
    if base in (int, float):
        return _to_number(value, base)
    if base is dict:
        return _to_dict(value, member)
    if base in _SIMPLE_CONVERTERS:
        return _SIMPLE_CONVERTERS[base](value)
    if isinstance(base, type) and issubclass(base, Enum):
        return _to_enum_value(value, base)
    raise ConversionError(f"{value!r} cannot be given here")


def _to_bool(value: object) -> bool:
    word = str(value).lower()
    if word not in BOOLEANS:
        raise ConversionError(f"{value!r} is neither true nor false")
    return BOOLEANS[word]


def _to_number(value: Any, number_type: Any) -> int | float:
    """Convert to `int` or `float`. An integer may be written as 1e3, but not as 1.5."""
    try:
        if number_type is int and isinstance(value, str) and SCIENTIFIC_NUMBER.fullmatch(value):
            exact: Any = float(value)
        else:
            exact = value
        has_fraction = isinstance(exact, float) and not exact.is_integer()
        if isinstance(value, bool) or (number_type is int and has_fraction):
            raise ValueError
        number: int | float = number_type(exact)
    except (ValueError, TypeError):
        raise ConversionError(f"{value!r} is not {NUMBER_NOUNS[number_type]}") from None
    if math.isnan(number):
        raise ConversionError("NaN is not allowed")
    return number


def _to_str(value: object) -> str:
    if isinstance(value, (dict, list)):
        raise ConversionError(f"{value!r} is not text")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _to_dict(value: object, member: object) -> dict[str, Any]:
    if isinstance(value, str):  # JSON tells numbers from text, so values are not converted
        return _parse_json_object(value)
    if not isinstance(value, dict):
        raise ConversionError(f"{value!r} is not a mapping")
    _, entry_type = typing.get_args(member) or (str, Any)
    if entry_type is Any:
        return {name: _convert_scientific_numbers(entry) for name, entry in value.items()}
    return {name: convert(entry, entry_type) for name, entry in value.items()}


def _parse_json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        error_class = DecisiveError if text.lstrip().startswith("{") else ConversionError
        raise error_class(f"{text!r} is not a JSON object ({error})") from None
    if not isinstance(value, dict):
        raise ConversionError(f"{value!r} is not a mapping")
    return value


def _convert_scientific_numbers(value: object) -> object:
    """Convert text such as 1e-5 to a number, in nested mappings and lists from YAML."""
    if isinstance(value, dict):
        return {name: _convert_scientific_numbers(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_convert_scientific_numbers(entry) for entry in value]
    if isinstance(value, str) and SCIENTIFIC_NUMBER.fullmatch(value):
        return float(value)
    return value


_SIMPLE_CONVERTERS: dict[object, Callable[[object], bool | str]] = {bool: _to_bool, str: _to_str}


def _to_choice(value: object, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if value == choice or (not isinstance(choice, bool) and str(value) == str(choice)):
            return choice
    raise ConversionError(f"{value!r} is not one of {', '.join(map(str, choices))}")


def _to_enum_value(value: object, enum_type: type[Enum]) -> Any:
    """Convert to the value of an enumeration's member, such as "cosine"."""
    legal_values = tuple(member.value for member in enum_type)
    try:
        return _to_choice("no" if value is False else value, legal_values)  # YAML reads no as False
    except ConversionError as error:
        raise DecisiveError(str(error)) from None


def _to_sequence(value: object, member: object) -> list[Any] | tuple[Any, ...]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    entry_types = typing.get_args(member) or (str,)
    if _base(member) is list:
        return [convert(entry, entry_types[0]) for entry in values]
    if len(values) != len(entry_types):
        raise ConversionError(f"{len(entry_types)} values are needed, not {len(values)}")
    pairs = zip(values, entry_types, strict=True)
    return tuple(convert(entry, entry_type) for entry, entry_type in pairs)


def read_config(path: str) -> dict[str, Any]:
    """Read a YAML file of options, and put its `env` mapping into the environment.

    Raises:
        OSError: there is no such file, or it is a folder.
        ValueError: the file is not UTF-8, is not a mapping, or has a key twice.
    """
    config = _read_mapping(path)
    environment = config.pop("env", {})
    if not isinstance(environment, dict):
        raise ValueError(f"env in {path} must be a mapping of names to values.")
    os.environ.update({str(name): str(value) for name, value in environment.items()})
    options: dict[str, Any] = {}
    for key, value in config.items():
        name = str(key).replace("-", "_")
        if name in options:
            raise ValueError(f"{path} has the key {name} twice, once with hyphens.")
        options[name] = value
    return options


def _read_mapping(path: str) -> dict[Any, Any]:
    """Read a YAML file that holds a mapping; an empty file is an empty mapping."""
    if Path(path).is_dir():
        raise IsADirectoryError(f"--config {path}: this is a folder; give a file in it.")
    if not Path(path).is_file():
        raise FileNotFoundError(f"--config {path}: there is no such file.")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--config {path}: this is not text in UTF-8 ({error}).") from None
    try:
        config = yaml.load(text, _UniqueKeyLoader) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must be a mapping of option names to values.")
    return config


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that is given twice. YAML would silently use the last value."""

    def compose_mapping_node(self, anchor: str | None) -> Any:
        node: Any = super().compose_mapping_node(anchor)  # type: ignore[arg-type]
        line_of_key: dict[tuple[str, str], int] = {}
        for key_node, _ in node.value:
            key = (key_node.tag, str(key_node.value))
            line = key_node.start_mark.line + 1
            if key in line_of_key:
                lines = f"in lines {line_of_key[key]} and {line}"
                raise yaml.YAMLError(f"the key {key_node.value} is given twice, {lines}")
            line_of_key[key] = line
        return node
