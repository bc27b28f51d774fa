"""Mixing several datasets into one."""

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDatasetDict,
    Value,
    concatenate_datasets,
    load_dataset,
)

from ..data.supervised import SOURCE_COLUMN
from ..number_format import pluralize
from .data_files import KINDS, check_encoding, naming_files
from .files import is_saved, load_dataset_source
from .values import ConversionError, convert

# All processes of a run, and a continued run, must keep the same rows for evaluation.
SPLIT_SEED = 0


@dataclass
class DatasetConfig:
    """One dataset of a mixture; the first fields are those of `datasets.load_dataset`."""

    path: str  # or a local file, or a folder written by `save_to_disk`
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    # Columns that are kept, or new ones alone: a text, or messages, with names of columns in
    # braces, such as {"prompt": "{instruction}", "completion": "{output}"}. None: all.
    columns: list[str] | dict[str, Any] | None = None
    fraction: float | None = None  # its share of the mixture
    limit: int | None = None  # most rows that are taken, the first ones
    # How often an epoch has each row: 0.5 has half of them, at random, the same in every run.
    weight: float = 1.0
    source: str | None = None  # its name in the log (`loss/NAME`) and the column `dataset_source`


@dataclass
class DatasetMixtureConfig:
    """Datasets to concatenate, with their shares, weights and limits.

    `datasets` are mappings with the fields of `DatasetConfig`. The rows of the test split are
    chosen at random, and are the same in every run. ValueError: only some datasets have a fraction,
    fractions, weights or limits are not positive, or streaming is combined with any but limits.
    """

    datasets: list[Any] = field(
        default_factory=list,
        metadata={"help": "Datasets to mix, in a configuration file: path, split, fraction, ..."},
    )
    streaming: bool = field(default=False, metadata={"help": "Stream the mixed datasets."})
    test_split_size: float | None = field(
        default=None,
        metadata={"help": "Share of the rows to train on that is kept for evaluation instead."},
    )

    def __post_init__(self) -> None:
        _check_test_split(self.test_split_size)
        self.datasets = [_entry(place, entry) for place, entry in enumerate(self.datasets)]
        shares = [entry.fraction for entry in self.datasets if entry.fraction is not None]
        if shares:
            _check_shares(shares, len(self.datasets))
        weighted = shares or any(entry.weight != 1 for entry in self.datasets)
        if self.streaming and (weighted or self.test_split_size is not None):
            raise ValueError(
                "datasets: fractions, weights and test_split_size need lengths, so streaming must "
                "be false."
            )


def _check_test_split(share: float | None) -> None:
    if share is not None and not 0 < share < 1:
        raise ValueError(f"test_split_size={share} must be a share above 0 and below 1.")


def _check_shares(shares: list[float], count: int) -> None:
    if len(shares) < count:
        raise ValueError("datasets: give a fraction to all of them or to none.")
    if min(shares) < 0 or max(shares) == 0:
        raise ValueError("datasets: fractions must not be negative, nor all of them 0.")


def _entry(place: int, entry: Any) -> DatasetConfig:
    if not isinstance(entry, DatasetConfig):
        legal = [f.name for f in dataclasses.fields(DatasetConfig)]
        if not isinstance(entry, dict):
            raise ValueError(
                f"datasets[{place}]: {entry!r:.80} must be a mapping, such as "
                f"{{path: DATA.jsonl}}; fields are {', '.join(legal)}."
            )
        unknown = sorted(set(entry) - set(legal))
        if unknown or "path" not in entry:
            problem = f"unknown field {unknown[0]!r}" if unknown else "no path"
            raise ValueError(f"datasets[{place}]: {problem}; fields are {', '.join(legal)}.")
        entry = DatasetConfig(**_with_numbers(place, entry))
    _check_values(place, entry)
    return entry


def _check_values(place: int, entry: DatasetConfig) -> None:
    for name, least in (("weight", 0), ("limit", 1)):
        value = getattr(entry, name)
        if value is not None and (value < least or value == 0):
            raise ValueError(f"datasets[{place}]: {name} must be above 0, not {value}.")
    if not isinstance(entry.columns, list | dict | None):
        raise ValueError(
            f"datasets[{place}]: columns must be a list of names, or a mapping of new columns to "
            f"texts such as '{{question}}', not {entry.columns!r:.80}."
        )


def _with_numbers(place: int, entry: dict[str, Any]) -> dict[str, Any]:
    """Convert numbers that YAML reads as text, such as 1e3; a ValueError names what is none."""
    types = typing.get_type_hints(DatasetConfig)
    numbers = {}
    for name in ("fraction", "limit", "weight"):
        if name in entry:
            try:
                numbers[name] = convert(entry[name], types[name])
            except ConversionError as error:
                raise ValueError(f"datasets[{place}]: {name}: {error}.") from None
    return entry | numbers


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict | IterableDatasetDict:
    """Load and concatenate the datasets of a mixture.

    With fractions, as many rows are taken as the scarcest dataset allows, the first ones of each.
    Limits come before fractions, and weights after them. There is a split "train", and "test" if
    `test_split_size` is set. ValueError: the mixture is empty.
    """
    entries = mixture_config.datasets
    if not entries:
        raise ValueError("datasets is empty: name at least one.")
    loaded = [_load(entry, mixture_config.streaming) for entry in entries]
    if entries[0].fraction is not None:
        loaded = _take_fractions(loaded, [entry.fraction for entry in entries])
    names = any(entry.source for entry in entries)
    pairs = zip(loaded, entries, strict=True)
    combined = concatenate_datasets([_changed(part, entry, names) for part, entry in pairs])
    if mixture_config.test_split_size is not None:
        return hold_out(combined, mixture_config.test_split_size)
    kind = IterableDatasetDict if mixture_config.streaming else DatasetDict
    return kind({"train": combined})


def hold_out(dataset: Any, share: float) -> DatasetDict:
    """Split a dataset into "train" and "test", of which "test" has a share of the rows.

    They are chosen at random, and are the same in every run. ValueError: it is a stream, or has
    not even two rows.
    """
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"--test_split_size {share} needs a dataset of known length, and this is a stream: "
            "leave out --dataset_streaming, or choose a split with --dataset_test_split."
        )
    if len(dataset) < 2:
        available = pluralize(len(dataset), "row")
        raise ValueError(f"--test_split_size {share}: {available} cannot be split.")
    rows = min(math.ceil(share * len(dataset)), len(dataset) - 1)
    return dataset.train_test_split(rows, seed=SPLIT_SEED)


def _load(entry: DatasetConfig, streaming: bool) -> Any:
    path = Path(entry.path).expanduser()
    # A name with the ending of a file is none of the hub, so that its absence is told at once.
    if path.is_file() or is_saved(path) or path.suffix in KINDS:
        splits = load_dataset_source(entry.path, entry.name, streaming, "datasets: path")
        if entry.split not in splits:
            raise ValueError(
                f"datasets: split {entry.split!r}: {entry.path} has the splits {', '.join(splits)}."
            )
        dataset = splits[entry.split]
    else:
        names = ("path", "name", "data_dir", "data_files", "split")
        options = {name: getattr(entry, name) for name in names}
        place, files = f"datasets: {entry.data_files or entry.path}", _local_files(entry.data_files)
        check_encoding(place, files)
        with naming_files(place, files):
            dataset = load_dataset(**options, streaming=streaming)
    if entry.limit is not None:
        dataset = dataset.take(entry.limit)
    if isinstance(entry.columns, dict):
        dataset = _with_new_columns(dataset, entry.columns)
    elif entry.columns is not None:
        dataset = dataset.select_columns(entry.columns)
    return _with_plain_strings(dataset)


def _with_new_columns(dataset: Any, templates: dict[str, Any]) -> Any:
    """Rows with new columns alone, made of the others."""
    names = dataset.column_names or [*next(iter(dataset), ())]
    try:
        fill_columns(dict.fromkeys(names, ""), templates)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"datasets: columns={templates!r:.200}: {error} is no column; the dataset has "
            f"{', '.join(names)}. Write {{{{ and }}}} for braces."
        ) from None
    fill = partial(fill_columns, templates=templates)
    return dataset.map(fill, remove_columns=[name for name in names if name not in templates])


def fill_columns(row: dict[str, Any], templates: dict[str, Any]) -> dict[str, Any]:
    """Fill the columns of a row, a missing value as nothing, into texts, also those of messages.

    White space around a filled text is cut off.
    """
    values = {name: "" if value is None else value for name, value in row.items()}

    def fill(template: Any) -> Any:
        if isinstance(template, str):
            return template.format_map(values).strip()
        if isinstance(template, dict):
            return {name: fill(value) for name, value in template.items()}
        return [fill(value) for value in template] if isinstance(template, list) else template

    return {name: fill(template) for name, template in templates.items()}


def _with_plain_strings(dataset: Any) -> Any:
    """Texts of CSV are of a type of their own, with which others cannot be concatenated."""
    features = dataset.features or {}
    large = [name for name, kind in features.items() if kind == Value("large_string")]
    plain = features | dict.fromkeys(large, Value("string"))
    return dataset.cast(Features(plain)) if large else dataset


def _local_files(data_files: Any) -> list[Path]:
    """The files here among some data files; others are addresses or patterns."""
    if isinstance(data_files, dict):
        return [file for files in data_files.values() for file in _local_files(files)]
    names = [data_files] if isinstance(data_files, str) else data_files or []
    return [path for path in map(Path, names) if path.is_file()]


def _changed(dataset: Any, entry: DatasetConfig, names: bool) -> Any:
    """Each row as often as its weight says, and with the name of its dataset."""
    if entry.weight != 1:
        whole, rest = divmod(round(entry.weight * len(dataset)), max(len(dataset), 1))
        chosen = np.random.default_rng(SPLIT_SEED).permutation(len(dataset))[:rest]
        dataset = dataset.select([*range(len(dataset))] * whole + sorted(chosen.tolist()))
    name = entry.source or entry.name or entry.path.rstrip("/").split("/")[-1]
    return dataset.map(lambda row: {SOURCE_COLUMN: name}) if names else dataset


def _take_fractions(datasets: list[Any], fractions: list[float]) -> list[Any]:
    weights = [fraction / sum(fractions) for fraction in fractions]
    pairs = list(zip(datasets, weights, strict=True))
    total = min(len(dataset) / weight for dataset, weight in pairs if weight > 0)
    return [dataset.select(range(round(weight * total))) for dataset, weight in pairs]
