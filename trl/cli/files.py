"""Load a dataset by its name: from the hub, from local files, or saved to disk."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import datasets.config
from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk

from ..sources import nearest_path, offline_variable, why_not_on_hub
from .data_files import ENDINGS, LOADER_OPTIONS, errors_naming_files, load_files

AnyDataset: TypeAlias = Dataset | IterableDataset
Splits: TypeAlias = Mapping[str, AnyDataset]


def load_dataset_source(
    name: str, config: str | None = None, streaming: bool = False, option: str = "--dataset_name"
) -> Splits:
    """Load a dataset as a mapping of split names to datasets; a single file is the split "train".

    Args:
        name: one of
            - a file with an ending in `LOADER_OPTIONS`,
            - a folder with such files, directly or in `data/`. The file names are the splits; if a
              name cannot be one, the folder is loaded as `datasets` loads a hub dataset,
            - a folder written by `save_to_disk`,
            - a hub id.
        config: configuration of a hub dataset.
        streaming: read rows when they are needed.
        option: the option that gives the name, for errors.

    Raises:
        ValueError: there is no such file, its ending is unknown, or it cannot be read.
    """
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix not in LOADER_OPTIONS:
            raise ValueError(
                f"{option} {path}: files of kind {path.suffix or 'unknown'!r} cannot be "
                f"read; use one of {ENDINGS}."
            )
        return load_files(f"{option} {path}", {"train": [str(path)]}, streaming)
    if path.is_dir():
        return _load_folder(path, streaming, option)
    if path.is_absolute() or name.startswith((".", "~")) or path.suffix in LOADER_OPTIONS:
        raise ValueError(f"{option} {name}: there is no such file.{_nearest(path)}")
    return _load_from_hub(name, config, streaming, option)


def _load_from_hub(name: str, config: str | None, streaming: bool, option: str) -> Splits:
    path = Path(name)
    # With the hub switched off, loading only looks into the cache, so it fails quickly itself.
    if offline_variable() is None and not _is_cached(name):
        reason = why_not_on_hub(name, "dataset")
        if reason is not None:
            raise ValueError(f"{option} {name}: {reason}.{_nearest(path)}")
    try:
        return load_dataset(name, name=config, streaming=streaming)
    except (ConnectionError, FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"{option} {name}: neither a local path nor a dataset that can be loaded from "
            f"the hub ({type(error).__name__}: {str(error).splitlines()[0]}).{_nearest(path)}"
        ) from error


def _is_cached(name: str) -> bool:
    """Return whether a dataset of the hub is in the local cache."""
    return Path(datasets.config.HF_DATASETS_CACHE, name.replace("/", "___")).exists()


def is_saved(path: Path) -> bool:
    """Return whether a folder was written by `save_to_disk`."""
    return any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json"))


def _load_folder(path: Path, streaming: bool, option: str) -> Splits:
    subject = f"{option} {path}"
    if is_saved(path):
        with errors_naming_files(subject, []):
            saved = load_from_disk(str(path))
        splits = DatasetDict({"train": saved}) if isinstance(saved, Dataset) else saved
        if not streaming:
            return splits
        return {name: dataset.to_iterable_dataset() for name, dataset in splits.items()}
    files = _data_files(path, option)
    files_by_split: dict[str, list[str]] = {}
    for file in files:
        files_by_split.setdefault(file.stem, []).append(str(file))
    if not all(re.fullmatch(r"\w+", split) for split in files_by_split):
        with errors_naming_files(subject, files):
            return load_dataset(str(path), streaming=streaming)
    return load_files(subject, files_by_split, streaming)


def _data_files(path: Path, option: str) -> list[Path]:
    """Return the data files of a folder, or of `data/` in it if there are none."""
    files = _files_in(path) or _files_in(path / "data")
    endings = sorted({file.suffix for file in files})
    loader_options = [LOADER_OPTIONS[ending] for ending in endings]
    if not files or any(options != loader_options[0] for options in loader_options):
        contents = f"files of several kinds ({', '.join(endings)})" if files else "no data file"
        raise ValueError(
            f"{option} {path}: the folder holds {contents}; it must be a saved dataset, or hold "
            f"files of one kind out of {ENDINGS}."
        )
    return files


def _files_in(folder: Path) -> list[Path]:
    """Return the data files directly in a folder; text files only if there are no others."""
    files = sorted(file for file in folder.glob("*") if file.suffix in LOADER_OPTIONS)
    return [file for file in files if file.suffix != ".txt"] or files


def _nearest(path: Path) -> str:
    nearest = nearest_path(path)
    return "" if nearest is None else f" The nearest is {nearest}."
