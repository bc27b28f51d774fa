"""JSON in UTF-8: values that it can hold, and files of JSON lines that a run appends to."""

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


def without_surrogates(value: Any) -> Any:
    """Replace lone surrogates, which UTF-8 cannot encode, by U+FFFD in text and nested values.

    Models write surrogates as escapes, such as `"\\ud83d"` in the JSON of a tool call. A pair of
    surrogates becomes the character it encodes. Only lists, tuples and dictionaries are copied.
    """
    if isinstance(value, str):
        return _encodable(value)
    if type(value) is dict:
        return {without_surrogates(key): without_surrogates(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(without_surrogates(entry) for entry in value)
    return value


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def json_values(value: Any) -> Any:
    """Copy nested lists and dictionaries with values that JSON in UTF-8 can hold.

    NaN and infinity become None, numbers of numpy and torch become Python numbers, lone surrogates
    become U+FFFD, and other keys become text. Other objects are not converted.
    """
    if isinstance(value, str):
        return _encodable(value)
    if isinstance(value, dict):
        return {_json_key(key): json_values(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(entry) for entry in value]
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_text(value: Any, **layout: Any) -> str:
    """Convert a value to valid JSON, with null for NaN and infinity.

    Objects that JSON cannot hold become text.

    Args:
        **layout: arguments of `json.dumps`, such as `indent` or `separators`.
    """
    options = layout | {"ensure_ascii": False, "allow_nan": False, "default": _serializable}
    try:
        text = json.dumps(value, **options)
    except (TypeError, ValueError):  # TypeError for keys, ValueError for NaN
        text = json.dumps(json_values(value), **options)
    return _encodable(text)


def _serializable(value: Any) -> Any:
    """Convert an object that `json.dumps` does not know, if need be to text."""
    converted = json_values(value)
    return str(value) if converted is value else converted


def _json_key(key: object) -> str | int | float | None:
    """Convert a dictionary key to one that JSON can hold: text, a finite number, or None."""
    if isinstance(key, str):
        return _encodable(key)
    if key is None or isinstance(key, int):
        return key
    if isinstance(key, float) and math.isfinite(key):
        return key
    return str(key)


class JsonLinesFile:
    """A file of JSON records, one per line, each with the optimizer `step` it belongs to.

    The first record creates the file. A reader always finds a complete file, except perhaps for its
    last line.
    """

    def __init__(self, path: Path):
        self.path = path

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """Append records. NaN becomes null, and other objects that JSON cannot hold become text."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            for record in records:
                file.write(json_text(record) + "\n")

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the records, except for a last line that is incomplete.

        Another process may be writing it, or a crash may have cut it, even inside a multi-byte
        character.
        """
        if not self.path.exists():
            return
        with self.path.open(encoding="utf-8", errors="replace") as file:
            for line in file:  # not `splitlines`, which also splits at other characters than \n
                with suppress(ValueError):
                    if line.endswith("\n"):
                        yield json.loads(line)

    def drop_after(self, step: int) -> None:
        """Remove the records of steps after `step`, and lines that a crash cut off."""
        if not self.path.exists():
            return
        shortened = JsonLinesFile(self.path.with_suffix(".kept"))
        shortened.path.write_text("")
        shortened.add(record for record in self.read() if record["step"] <= step)
        shortened.path.replace(self.path)
