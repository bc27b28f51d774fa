"""Load data files by their endings, and explain why a file cannot be read."""

import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetGenerationError

# Options of `load_dataset` by the ending of a file.
LOADER_OPTIONS: dict[str, dict[str, Any]] = {
    ".json": {"path": "json"},
    ".jsonl": {"path": "json"},
    ".csv": {"path": "csv"},
    ".tsv": {"path": "csv", "sep": "\t"},
    ".parquet": {"path": "parquet"},
    ".arrow": {"path": "arrow"},
    ".txt": {"path": "text"},
}
ENDINGS = ", ".join(LOADER_OPTIONS)
TEXT_ENDINGS = (".json", ".jsonl", ".csv", ".tsv", ".txt")
# The encoding of larger files is not checked. Reading a gigabyte takes about a second.
CHECKED_BYTES = 1_000_000_000
CHUNK_BYTES = 2**24
DIAGNOSED_LINES = 1_000_000  # lines in which the cause of an error is searched
TRAILING_COMMA = re.compile(r",\s*[\]}]")


def load_files(
    subject: str, files_by_split: dict[str, list[str]], streaming: bool = False
) -> Mapping[str, Dataset | IterableDataset]:
    """Load the files of each split. All must have the format of the first file.

    Args:
        subject: the beginning of errors, such as "--dataset_name rows.jsonl".

    Raises:
        ValueError: a file cannot be read.
    """
    paths = [Path(file) for files in files_by_split.values() for file in files]
    check_encoding(subject, paths)
    options = LOADER_OPTIONS[paths[0].suffix]
    with errors_naming_files(subject, paths):
        splits = load_dataset(**options, data_files=files_by_split, streaming=streaming)
        if streaming:
            # Read a row of each split now. Later, an error would not name the file.
            for split in splits.values():
                next(iter(split), None)
    return splits


def check_encoding(subject: str, paths: Sequence[Path]) -> None:
    """Raise a ValueError if a text file is not UTF-8. Loading would find out only at the row."""
    for path in paths:
        if path.suffix in TEXT_ENDINGS and path.stat().st_size <= CHECKED_BYTES:
            decoder = codecs.getincrementaldecoder("utf-8")()
            try:
                with path.open("rb") as file:
                    while chunk := file.read(CHUNK_BYTES):
                        decoder.decode(chunk)
                decoder.decode(b"", final=True)
            except UnicodeDecodeError:
                reason = _broken_line(path)
                raise ValueError(f"{subject}: cannot be read ({reason}).") from None


@contextmanager
def errors_naming_files(subject: str, paths: Sequence[Path]) -> Iterator[None]:
    """Raise errors of reading files as ValueErrors with the file, the line and what is wrong."""
    try:
        yield
    except (DatasetGenerationError, OSError, StopIteration, ValueError) as error:
        cause = error.__cause__ or error
        reason = (str(cause).splitlines() or ["it holds no rows"])[0].rstrip(".")
        if "corresponds to no data" in reason:
            reason = "it holds no rows"
        if any(path.is_file() and path.stat().st_size for path in paths):
            reason = next(filter(None, map(_broken_line, paths)), reason)
        elif paths:
            reason = "it holds no rows"
        raise ValueError(f"{subject}: cannot be read ({reason}).") from error


def _broken_line(path: Path) -> str | None:
    """Return which line of a text file is broken, and how; None if none is."""
    if path.suffix not in TEXT_ENDINGS or not path.is_file():
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
            problem = _json_lines_problem(text) if path.suffix == ".jsonl" else None
            if problem is not None:
                return f"line {number} of {path.name} {problem}"
    return _broken_json_line(path) if path.suffix == ".json" else None


def _json_lines_problem(text: str) -> str | None:
    """Return what is wrong with a line of JSON Lines, if anything is."""
    row = text.strip()
    error = _json_error(row) if row else None
    if error is None:
        return None
    if row.endswith(",") and _json_error(row[:-1]) is None:
        return "ends with a comma, but JSON Lines has none between rows; remove it"
    if TRAILING_COMMA.search(row):
        return "has a comma before a closing bracket; remove it"
    return f"is not valid JSON: {error.msg}"


def _broken_json_line(path: Path) -> str | None:
    """Return what is wrong with a JSON file, which may hold a list or, like JSON Lines, rows."""
    text = path.read_text(encoding="utf-8-sig")
    error = _json_error(text)
    if error is None or error.msg == "Extra data":  # rows without a list
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
