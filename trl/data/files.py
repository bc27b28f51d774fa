"""Datasets by name: from the hub, from local files, or saved to disk."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def load_dataset_source(name: str, config: str | None = None, streaming: bool = False) -> Any:
    """Load all splits of a dataset.

    Args:
        name (`str`): a json, jsonl, csv or parquet file, a folder of such files (their names are
            the splits), a folder written by `save_to_disk`, or a hub id.
        config (`str`, *optional*): configuration of a hub dataset.
        streaming (`bool`): read rows as they are needed.

    Returns:
        A mapping of split names to datasets; a single file is the split "train".

    Raises:
        ValueError: if there is no such file, or its kind is unknown.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return _files({"train": str(path)}, path.suffix, streaming)
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
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        return _saved(path, streaming)
    files = sorted(file for file in path.iterdir() if file.suffix in BUILDERS)
    kinds = {BUILDERS[file.suffix] for file in files}
    if len(kinds) != 1:
        found = f"files of several kinds ({', '.join(kinds)})" if kinds else "no data file"
        raise ValueError(
            f"--dataset_name {path}: the folder holds {found}; it must be a saved dataset, or hold "
            f"files of one of {', '.join(BUILDERS)}."
        )
    return _files({file.stem: str(file) for file in files}, files[0].suffix, streaming)


def _saved(path: Path, streaming: bool) -> Any:
    found = load_from_disk(str(path))
    splits = DatasetDict({"train": found}) if isinstance(found, Dataset) else found
    if streaming:
        return {name: dataset.to_iterable_dataset() for name, dataset in splits.items()}
    return splits


def _files(files: dict[str, str], suffix: str, streaming: bool) -> Any:
    if suffix not in BUILDERS:
        raise ValueError(
            f"--dataset_name {next(iter(files.values()))}: files of kind {suffix or 'unknown'!r} "
            f"cannot be read; use one of {', '.join(BUILDERS)}."
        )
    return load_dataset(BUILDERS[suffix], data_files=files, streaming=streaming)


def _nearest(path: Path) -> str:
    folder = path.expanduser().parent
    if not folder.is_dir():
        return ""
    close = difflib.get_close_matches(path.name, [file.name for file in folder.iterdir()], n=1)
    return f" The nearest is {folder / close[0]}." if close else ""
