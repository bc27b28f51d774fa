"""Datasets by name: from the hub, from local files, or saved to disk."""

import re
from pathlib import Path
from typing import Any

import datasets.config
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

from ..sources import missing_from_hub, nearest_path, offline_variable

BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


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
        if path.suffix not in BUILDERS:
            raise ValueError(
                f"--dataset_name {path}: files of kind {path.suffix or 'unknown'!r} cannot be "
                f"read; use one of {', '.join(BUILDERS)}."
            )
        files = {"train": [str(path)]}
        return _read(path, BUILDERS[path.suffix], data_files=files, streaming=streaming)
    if path.is_dir():
        return _folder(path, streaming)
    if path.is_absolute() or name.startswith((".", "~")) or path.suffix in BUILDERS:
        raise ValueError(f"--dataset_name {name}: there is no such file.{_nearest(path)}")
    return _from_hub(name, config, streaming)


def _from_hub(name: str, config: str | None, streaming: bool) -> Any:
    path = Path(name)
    # With the hub switched off, loading looks into the cache, and fails at once.
    may_load = offline_variable() is not None or _is_cached(name)
    if not may_load and (reason := missing_from_hub(name, "dataset")) is not None:
        raise ValueError(f"--dataset_name {name}: {reason}.{_nearest(path)}")
    try:
        return load_dataset(name, name=config, streaming=streaming)
    except (ConnectionError, FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"--dataset_name {name}: neither a local path nor a dataset that can be loaded from "
            f"the hub ({type(error).__name__}: {str(error).splitlines()[0]}).{_nearest(path)}"
        ) from error


def _is_cached(name: str) -> bool:
    """Whether a dataset of the hub was loaded before, so that it can be without the hub."""
    return Path(datasets.config.HF_DATASETS_CACHE, name.replace("/", "___")).exists()


def _folder(path: Path, streaming: bool) -> Any:
    if any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
        found = load_from_disk(str(path))
        saved = DatasetDict({"train": found}) if isinstance(found, Dataset) else found
        return {k: v.to_iterable_dataset() for k, v in saved.items()} if streaming else saved
    files = _data_files(path)
    splits: dict[str, list[str]] = {}
    for file in files:
        splits.setdefault(file.stem, []).append(str(file))
    if not all(re.fullmatch(r"\w+", split) for split in splits):
        return _read(path, str(path), streaming=streaming)
    return _read(path, BUILDERS[files[0].suffix], data_files=splits, streaming=streaming)


def _data_files(path: Path) -> list[Path]:
    folders = [path.glob("*"), (path / "data").glob("*")]
    above, inside = (sorted(f for f in found if f.suffix in BUILDERS) for found in folders)
    kinds = sorted({BUILDERS[file.suffix] for file in above or inside})
    if len(kinds) != 1:
        found = f"files of several kinds ({', '.join(kinds)})" if kinds else "no data file"
        raise ValueError(
            f"--dataset_name {path}: the folder holds {found}; it must be a saved dataset, or hold "
            f"files of one kind out of {', '.join(BUILDERS)}."
        )
    return above or inside


def _read(place: Path, builder: str, **options: Any) -> Any:
    try:
        return load_dataset(builder, **options)
    except (DatasetGenerationError, OSError, StopIteration, ValueError) as error:
        cause = error.__cause__ or error
        reason = (str(cause).splitlines() or ["it holds no rows"])[0]
        raise ValueError(f"--dataset_name {place}: cannot be read ({reason}).") from error


def _nearest(path: Path) -> str:
    nearest = nearest_path(path)
    return "" if nearest is None else f" The nearest is {nearest}."
