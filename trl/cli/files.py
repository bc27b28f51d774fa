"""Datasets by name: from the hub, from local files, or saved to disk."""

import difflib
import re
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

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
    while not path.parent.is_dir():
        path = path.parent
    close = difflib.get_close_matches(path.name, [file.name for file in path.parent.iterdir()], n=1)
    return f" The nearest is {path.with_name(close[0])}." if close else ""
