"""Datasets by name: from the hub, from local files, or saved to disk."""

import difflib
import re
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
SPLIT_NAME = re.compile(r"\w+")
UNREADABLE = (DatasetGenerationError, OSError, StopIteration, ValueError)


def load_dataset_source(name: str, config: str | None = None, streaming: bool = False) -> Any:
    """Load a dataset as a mapping of split names to datasets; a single file is the split "train".

    `name` is a json, jsonl, csv or parquet file, a folder of such files (their names are the
    splits; names that cannot be are treated as those of a hub dataset), a folder with such files in
    `data/`, a folder written by `save_to_disk`, or a hub id, which may have a `config`. A stream
    reads rows as they are needed. ValueError: there is no such file, its kind is unknown, or it
    cannot be read.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return _files({"train": [str(path)]}, path, path.suffix, streaming)
    if path.is_dir():
        return _folder(path, streaming)
    if path.is_absolute() or name.startswith((".", "~")) or path.suffix in BUILDERS:
        raise ValueError(f"--dataset_name {name}: there is no such file.{_nearest(path)}")
    try:
        return load_dataset(name, name=config, streaming=streaming)
    except (ConnectionError, FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"--dataset_name {name}: neither a local path nor a dataset that can be loaded from "
            f"the hub ({type(error).__name__}: {str(error).splitlines()[0]}).{_nearest(path)}"
        ) from error


def _folder(path: Path, streaming: bool) -> Any:
    if any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
        found = load_from_disk(str(path))
        saved = DatasetDict({"train": found}) if isinstance(found, Dataset) else found
        return {k: v.to_iterable_dataset() for k, v in saved.items()} if streaming else saved
    files = _data_files(path) or _data_files(path / "data")
    _check_kinds(path, files)
    if not all(SPLIT_NAME.fullmatch(file.stem) for file in files):
        return _read(str(path), path, streaming=streaming)
    splits: dict[str, list[str]] = {}
    for file in files:
        splits.setdefault(file.stem, []).append(str(file))
    return _files(splits, path, files[0].suffix, streaming)


def _data_files(path: Path) -> list[Path]:
    return sorted(file for file in path.glob("*") if file.suffix in BUILDERS)


def _check_kinds(path: Path, files: list[Path]) -> None:
    kinds = sorted({BUILDERS[file.suffix] for file in files})
    if len(kinds) != 1:
        found = f"files of several kinds ({', '.join(kinds)})" if kinds else "no data file"
        raise ValueError(
            f"--dataset_name {path}: the folder holds {found}; it must be a saved dataset, or hold "
            f"files of one of {', '.join(BUILDERS)}."
        )


def _files(splits: dict[str, list[str]], place: Path, suffix: str, streaming: bool) -> Any:
    if suffix not in BUILDERS:
        raise ValueError(
            f"--dataset_name {place}: files of kind {suffix or 'unknown'!r} cannot be read; use "
            f"one of {', '.join(BUILDERS)}."
        )
    return _read(BUILDERS[suffix], place, data_files=splits, streaming=streaming)


def _read(builder: str, place: Path, **options: Any) -> Any:
    try:
        return load_dataset(builder, **options)
    except UNREADABLE as error:
        cause = error.__cause__ or error
        reason = (str(cause).splitlines() or ["it holds no rows"])[0]
        raise ValueError(f"--dataset_name {place}: cannot be read ({reason}).") from error


def _nearest(path: Path) -> str:
    while not path.parent.is_dir():
        path = path.parent
    folder = path.parent
    close = difflib.get_close_matches(path.name, [file.name for file in folder.iterdir()], n=1)
    return f" The nearest is {folder / close[0]}." if close else ""
