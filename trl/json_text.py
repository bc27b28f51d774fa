"""Text and values that fit into files of JSON in UTF-8, whatever a model or a user's code wrote."""

import json
import math
from typing import Any


def without_surrogates(value: Any) -> Any:
    """Replace lone surrogates, which UTF-8 cannot encode, by U+FFFD, in nested values, too.

    Models write them as escapes, such as `"\\ud83d"` in a tool call's JSON. A pair of them becomes
    the character that it stands for. Only lists, tuples and dictionaries are copied.
    """
    if isinstance(value, str):
        return _encodable(value)
    if type(value) is dict:
        return {without_surrogates(key): without_surrogates(x) for key, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(without_surrogates(x) for x in value)
    return value


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def json_values(value: Any) -> Any:
    """Copy nested lists and dictionaries with values that JSON in UTF-8 can hold.

    NaN and infinity become None, numbers of numpy and torch plain ones, lone surrogates U+FFFD,
    keys text. Other objects are left as they are.
    """
    if isinstance(value, str):
        return _encodable(value)
    if isinstance(value, dict):
        return {_key(key): json_values(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(entry) for entry in value]
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_text(value: Any, **options: Any) -> str:
    """Write a value as valid JSON, with null for NaN and infinity.

    `options` are those of `json.dumps` that concern the layout. Objects that JSON cannot hold are
    written as text.
    """
    options |= {"ensure_ascii": False, "allow_nan": False, "default": _plain}
    try:
        text = json.dumps(value, **options)
    except (TypeError, ValueError):  # of keys; of NaN
        text = json.dumps(json_values(value), **options)
    return _encodable(text)


def _plain(value: Any) -> Any:
    plain = json_values(value)
    return str(value) if plain is value else plain


def _key(key: Any) -> Any:
    """A key that JSON can hold: text, numbers, and None as they are."""
    if isinstance(key, str):
        return _encodable(key)
    is_finite = not isinstance(key, float) or math.isfinite(key)
    return key if key is None or (isinstance(key, (int, float)) and is_finite) else str(key)
