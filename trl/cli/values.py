"""From what a user wrote, on the command line or in YAML, to the type an option declares."""

import json
import math
import os
import re
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

WORDS = dict.fromkeys(("true", "t", "yes", "y", "1", "on"), True)
WORDS |= dict.fromkeys(("false", "f", "no", "n", "0", "off"), False)
NONE = ("none", "null")
NUMBERS = {int: "an integer", float: "a number"}
# Numbers that YAML 1.1 reads as text, because they have no point or no sign: 1e-5, 1.5e3. Longer
# ones may be names, such as the abbreviated commit 12345e6.
SCIENTIFIC = re.compile(r"[-+]?\d{1,3}(\.\d*)?[eE][-+]?\d{1,2}")


class ConversionError(ValueError):
    """A value does not fit the type of its option."""


class DecisiveError(ConversionError):
    """A value so nearly fits one of the types that it cannot be meant as text."""


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the annotation alone."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def is_sequence(annotation: Any) -> bool:
    """Whether several words may be given."""
    return any(_base(member) in (list, tuple) for member in members(annotation))


def is_flag(annotation: Any) -> bool:
    """Whether the option may be given without a value."""
    return bool in members(annotation)


def convert(value: Any, annotation: Any) -> Any:
    """Convert a string, a list of strings or a YAML value to a type, or the best one of a union."""
    choices, alone = members(annotation), _alone(value)
    # Where text is allowed, the word "none" is text.
    is_none = str(alone).lower() in NONE and str not in choices
    if type(None) in choices and (alone is None or is_none):
        return None
    errors = []
    for member in sorted(choices, key=lambda m: _rank(m, value)):
        if member is type(None):
            continue
        try:
            return _to(value, member)
        except DecisiveError:
            raise
        except ConversionError as error:
            errors.append(error)
    raise errors[0]


def _alone(value: Any) -> Any:
    """The element of a list of one; anything else as it is."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _base(member: Any) -> Any:
    return typing.get_origin(member) or member


def _rank(member: Any, value: Any) -> int:
    """Try specific types before strings, and several values as a list."""
    base = _base(member)
    if base in (list, tuple):
        return 0 if isinstance(value, (list, tuple)) and len(value) != 1 else 3
    return {int: 0, float: 0, str: 2}.get(base, 1)


def _to(value: Any, member: Any) -> Any:
    base = _base(member)
    if base is Any:
        return value
    if value is None:
        raise ConversionError("a value is needed")
    if base in (list, tuple):
        return _sequence(value, member)
    value = _alone(value)
    if base is typing.Literal:
        return _one_of(value, typing.get_args(member))
    if base in NUMBERS:
        return _number(value, base, NUMBERS[base])
    if base is dict:
        return _dict(value, member)
    simple = {bool: _bool, str: _str}
    if base in simple:
        return simple[base](value)
    if isinstance(base, type) and issubclass(base, Enum):
        return _name_of(value, base)
    raise ConversionError(f"{value!r} cannot be given here")


def _bool(value: Any) -> bool:
    word = str(value).lower()
    if word not in WORDS:
        raise ConversionError(f"{value!r} is neither true nor false")
    return WORDS[word]


def _number(value: Any, kind: type[int] | type[float], noun: str) -> Any:
    try:
        number = value
        if kind is int and isinstance(value, str) and SCIENTIFIC.fullmatch(value):
            number = float(value)  # such as 1e3
        is_cut = kind is int and isinstance(number, float) and not number.is_integer()
        if isinstance(value, bool) or is_cut:
            raise ValueError
        number = kind(number)
    except (ValueError, TypeError):
        raise ConversionError(f"{value!r} is not {noun}") from None
    if math.isnan(number):
        raise ConversionError("NaN is not allowed")
    return number


def _str(value: Any) -> str:
    if isinstance(value, (dict, list)):
        raise ConversionError(f"{value!r} is not text")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _dict(value: Any, member: Any) -> dict[str, Any]:
    if isinstance(value, str):  # JSON, which tells numbers from text
        return _json_object(value)
    if not isinstance(value, dict):
        raise ConversionError(f"{value!r} is not a mapping")
    _, entry_type = typing.get_args(member) or (str, Any)
    if entry_type is Any:
        return {name: _with_numbers(entry) for name, entry in value.items()}
    return {name: convert(entry, entry_type) for name, entry in value.items()}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        kind = DecisiveError if text.lstrip().startswith("{") else ConversionError
        raise kind(f"{text!r} is not a JSON object ({error})") from None
    if not isinstance(value, dict):
        raise ConversionError(f"{value!r} is not a mapping")
    return value


def _with_numbers(value: Any) -> Any:
    """Read text such as 1e-5 as a number, at any depth of what YAML made without a type."""
    if isinstance(value, dict):
        return {name: _with_numbers(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_with_numbers(entry) for entry in value]
    is_number = isinstance(value, str) and SCIENTIFIC.fullmatch(value)
    return float(value) if is_number else value


def _one_of(value: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if value == choice or (not isinstance(choice, bool) and str(value) == str(choice)):
            return choice
    raise ConversionError(f"{value!r} is not one of {', '.join(map(str, choices))}")


def _name_of(value: Any, names: type[Enum]) -> Any:
    legal = tuple(name.value for name in names)
    try:
        return _one_of("no" if value is False else value, legal)  # False is YAML's word no
    except ConversionError as error:
        raise DecisiveError(str(error)) from None


def _sequence(value: Any, member: Any) -> Any:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    kinds = typing.get_args(member) or (str,)
    if _base(member) is list:
        return [convert(item, kinds[0]) for item in values]
    if len(values) != len(kinds):
        raise ConversionError(f"{len(kinds)} values are needed, not {len(values)}")
    return tuple(convert(item, kind) for item, kind in zip(values, kinds, strict=True))


def read_config(path: str) -> dict[str, Any]:
    """Read a YAML file of options, and put its `env` mapping into the environment.

    It must be a mapping without a key that is given twice: a ValueError otherwise.
    """
    if Path(path).is_dir():
        raise IsADirectoryError(f"--config {path}: this is a folder; give a file in it.")
    if not Path(path).is_file():
        raise FileNotFoundError(f"--config {path}: there is no such file.")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--config {path}: this is no text in UTF-8 ({error}).") from None
    try:
        config = yaml.load(text, _Loader) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must be a mapping of option names to values.")
    environment = config.pop("env", {})
    if not isinstance(environment, dict):
        raise ValueError(f"env in {path} must be a mapping of names to values.")
    os.environ.update({str(name): str(value) for name, value in environment.items()})
    names = [str(key).replace("-", "_") for key in config]
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise ValueError(f"{path} has the key {twice} twice, once with hyphens.")
    return dict(zip(names, config.values(), strict=True))


class _Loader(yaml.SafeLoader):
    """Refuses equal keys, of which YAML would silently take the last."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node: Any = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            name, line = (key.tag, str(key.value)), key.start_mark.line + 1
            if name in lines:
                where = f"in lines {lines[name]} and {line}"
                raise yaml.YAMLError(f"the key {name[1]} is given twice, {where}")
            lines[name] = line
        return node
