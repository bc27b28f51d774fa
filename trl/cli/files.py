"""Datasets by name: from the hub, from local files, or saved to disk."""

import re
from pathlib import Path
from typing import Any

import datasets.config
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from ..sources import nearest_path, offline_variable, why_not_on_hub
from .data_files import ENDINGS, KINDS, load_files, naming_files


def load_dataset_source(
    name: str, config: str | None = None, streaming: bool = False, option: str = "--dataset_name"
) -> Any:
    """Load a dataset as a mapping of split names to datasets; a single file is the split "train".

    `name` is a file of one of `KINDS`, a folder of such files (their names are the splits; names
    that cannot be are treated as those of a hub dataset), a folder with such files in `data/`, a
    folder written by `save_to_disk`, or a hub id, which may have a `config`. A stream reads rows as
    they are needed. ValueError, which names the `option`: there is no such file, its kind is
    unknown, or it cannot be read.
    """
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix not in KINDS:
            raise ValueError(
                f"{option} {path}: files of kind {path.suffix or 'unknown'!r} cannot be "
                f"read; use one of {ENDINGS}."
            )
        return load_files(f"{option} {path}", {"train": [str(path)]}, streaming)
    if path.is_dir():
        return _folder(path, streaming, option)
    if path.is_absolute() or name.startswith((".", "~")) or path.suffix in KINDS:
        raise ValueError(f"{option} {name}: there is no such file.{_nearest(path)}")
    return _from_hub(name, config, streaming, option)


def _from_hub(name: str, config: str | None, streaming: bool, option: str) -> Any:
    path = Path(name)
    # With the hub switched off, loading looks into the cache, and fails at once.
    may_load = offline_variable() is not None or _is_cached(name)
    if not may_load and (reason := why_not_on_hub(name, "dataset")) is not None:
        raise ValueError(f"{option} {name}: {reason}.{_nearest(path)}")
    try:
        return load_dataset(name, name=config, streaming=streaming)
    except (ConnectionError, FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"{option} {name}: neither a local path nor a dataset that can be loaded from "
            f"the hub ({type(error).__name__}: {str(error).splitlines()[0]}).{_nearest(path)}"
        ) from error


def _is_cached(name: str) -> bool:
    """Whether a dataset of the hub was loaded before, so that it can be without the hub."""
    return Path(datasets.config.HF_DATASETS_CACHE, name.replace("/", "___")).exists()


def is_saved(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json"))


def _folder(path: Path, streaming: bool, option: str) -> Any:
    place = f"{option} {path}"
    if is_saved(path):
        with naming_files(place, []):
            found = load_from_disk(str(path))
        saved = DatasetDict({"train": found}) if isinstance(found, Dataset) else found
        return {k: v.to_iterable_dataset() for k, v in saved.items()} if streaming else saved
    files = _data_files(path, option)
    splits: dict[str, list[str]] = {}
    for file in files:
        splits.setdefault(file.stem, []).append(str(file))
    if not all(re.fullmatch(r"\w+", split) for split in splits):
        with naming_files(place, files):
            return load_dataset(str(path), streaming=streaming)
    return load_files(place, splits, streaming)


def _data_files(path: Path, option: str) -> list[Path]:
    """The data files of a folder, or else of `data/` in it; texts only if there are no others."""
    files = _files_in(path) or _files_in(path / "data")
    endings = sorted({file.suffix for file in files})
    if any(KINDS[ending] != KINDS[endings[0]] for ending in endings) or not files:
        found = f"files of several kinds ({', '.join(endings)})" if files else "no data file"
        raise ValueError(
            f"{option} {path}: the folder holds {found}; it must be a saved dataset, or hold "
            f"files of one kind out of {ENDINGS}."
        )
    return files


def _files_in(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.glob("*") if file.suffix in KINDS)
    return [file for file in files if file.suffix != ".txt"] or files


def _nearest(path: Path) -> str:
    nearest = nearest_path(path)
    return "" if nearest is None else f" The nearest is {nearest}."
