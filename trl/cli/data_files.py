"""Data files by their endings: how each is read, and what is wrong with one that cannot be."""

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import load_dataset
from datasets.exceptions import DatasetGenerationError

# Options of `load_dataset` by the ending of a file.
KINDS: dict[str, dict[str, Any]] = {
    ".json": {"path": "json"},
    ".jsonl": {"path": "json"},
    ".csv": {"path": "csv"},
    ".tsv": {"path": "csv", "sep": "\t"},
    ".parquet": {"path": "parquet"},
    ".arrow": {"path": "arrow"},
    ".txt": {"path": "text"},
}
ENDINGS = ", ".join(KINDS)
TEXT = (".json", ".jsonl", ".csv", ".tsv", ".txt")
# Of larger files the encoding is not checked; reading a gigabyte takes about a second.
CHECKED_BYTES = 1_000_000_000
CHUNK_BYTES = 2**24
DIAGNOSED_LINES = 1_000_000
TRAILING_COMMA = re.compile(r",\s*[\]}]")


def load_files(place: str, files: dict[str, list[str]], streaming: bool = False) -> Any:
    """Load the files of splits, all of the kind of the first, as a mapping of split names.

    `place` is what messages call them. ValueError: one of them cannot be read.
    """
    paths = [Path(file) for names in files.values() for file in names]
    check_encoding(place, paths)
    options = KINDS[paths[0].suffix]
    with naming_files(place, paths):
        splits = load_dataset(**options, data_files=files, streaming=streaming)
        if streaming:  # which would fail later, without the name of a file
            for split in splits.values():
                next(iter(split), None)
    return splits


def check_encoding(place: str, paths: Sequence[Path]) -> None:
    """Refuse text files that are not UTF-8, which are found out only when a row is read."""
    for path in paths:
        if path.suffix in TEXT and path.stat().st_size <= CHECKED_BYTES:
            decoder = codecs.getincrementaldecoder("utf-8")()
            try:
                with path.open("rb") as file:
                    while chunk := file.read(CHUNK_BYTES):
                        decoder.decode(chunk)
                decoder.decode(b"", final=True)
            except UnicodeDecodeError:
                raise ValueError(f"{place}: cannot be read ({_problem(path)}).") from None


@contextmanager
def naming_files(place: str, paths: Sequence[Path]) -> Iterator[None]:
    """Let errors of reading files name the file, its line, and what is wrong there."""
    try:
        yield
    except (DatasetGenerationError, OSError, StopIteration, ValueError) as error:
        cause = error.__cause__ or error
        reason = (str(cause).splitlines() or ["it holds no rows"])[0].rstrip(".")
        if any(path.is_file() and path.stat().st_size for path in paths):
            reason = next(filter(None, map(_problem, paths)), reason)
        elif paths:
            reason = "it holds no rows"
        raise ValueError(f"{place}: cannot be read ({reason}).") from error


def _problem(path: Path) -> str | None:
    """Say in which line a text file is broken, and how; None if no line is."""
    if path.suffix not in TEXT or not path.is_file():
        return None
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            return f"{path.name} is UTF-16; save it as UTF-8"
        file.seek(0)
        for number, line in enumerate(islice(file, DIAGNOSED_LINES), 1):
            try:
                text = line.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                byte = line[error.start]
                return (
                    f"line {number} of {path.name} is not UTF-8: byte 0x{byte:02x}, "
                    f"{chr(byte)!r} in latin-1; save it as UTF-8, for example with "
                    f"`iconv -f latin1 -t utf-8`"
                )
            if path.suffix == ".jsonl" and (problem := _problem_of_row(text)) is not None:
                return f"line {number} of {path.name} {problem}"
    return _problem_of_json(path) if path.suffix == ".json" else None


def _problem_of_row(text: str) -> str | None:
    """What is wrong with a line of JSON Lines, if something is."""
    row = text.strip()
    error = _json_error(row) if row else None
    if error is None:
        return None
    if row.endswith(",") and _json_error(row[:-1]) is None:
        return "ends with a comma, but JSON Lines has none between rows; remove it"
    if TRAILING_COMMA.search(row):
        return "has a comma before a closing bracket; remove it"
    return f"is not valid JSON: {error.msg}"


def _problem_of_json(path: Path) -> str | None:
    """What is wrong with a file of JSON, which may hold a list or, like JSON Lines, rows."""
    text = path.read_text(encoding="utf-8-sig")
    error = _json_error(text)
    if error is None or error.msg == "Extra data":
        return None
    start = text.rfind(",", 0, error.pos + 1)
    if start >= 0 and TRAILING_COMMA.match(text, start):
        line = text.count("\n", 0, start) + 1
        return f"line {line} of {path.name} has a comma before a closing bracket; remove it"
    return f"line {error.lineno} of {path.name} is not valid JSON: {error.msg}"


def _json_error(text: str) -> json.JSONDecodeError | None:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error
    return None
