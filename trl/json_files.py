"""Files of JSON in UTF-8: values that fit into them, and lines that a run appends."""

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
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


class StepLines:
    """A file of JSON lines, each with `step`, the optimizer step that it belongs to.

    It is whole at any instant, and made with its first line.
    """

    def __init__(self, path: Path):
        self.path = path

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """Append records; NaN becomes null, and what JSON cannot hold otherwise, text."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            for record in records:
                file.write(json_text(record) + "\n")

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the records, without a last line that is being written or was cut off.

        A crash may have cut it inside a character of several bytes.
        """
        if not self.path.exists():
            return
        with self.path.open(encoding="utf-8", errors="replace") as file:
            for line in file:  # splitlines would split at more than \n
                with suppress(ValueError):
                    if line.endswith("\n"):
                        yield json.loads(line)

    def keep_until(self, step: int) -> None:
        """Drop what a run that went further than `step` wrote, and lines that a crash cut off."""
        if not self.path.exists():
            return
        kept = StepLines(self.path.with_suffix(".kept"))
        kept.path.write_text("")
        kept.add(record for record in self.read() if record["step"] <= step)
        kept.path.replace(self.path)
