"""Mix several datasets into one."""

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
from .data_files import LOADER_OPTIONS, check_encoding, errors_naming_files
from .files import AnyDataset, is_saved, load_dataset_source
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
    # A list of columns to keep, or a dictionary of new columns that replace all others: text or
    # messages with column names in braces, such as
    # {"prompt": "{instruction}", "completion": "{output}"}. None keeps all columns.
    columns: list[str] | dict[str, Any] | None = None
    fraction: float | None = None  # share of the mixture
    limit: int | None = None  # maximum number of rows; the first ones are taken
    # How often each row occurs per epoch. With 0.5, a random half occurs, the same in every run.
    weight: float = 1.0
    source: str | None = None  # name in the log (`loss/NAME`) and in the column `dataset_source`


@dataclass
class DatasetMixtureConfig:
    """Datasets to concatenate, with their shares, weights and limits.

    `datasets` are mappings with the fields of `DatasetConfig`. The rows of the test split are
    chosen at random, and are the same in every run.

    Raises:
        ValueError: only some datasets have a fraction; fractions, weights or limits are not
            positive; or fractions, weights or a test split are combined with streaming.
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
        self.datasets = [_read_entry(index, entry) for index, entry in enumerate(self.datasets)]
        fractions = [entry.fraction for entry in self.datasets if entry.fraction is not None]
        if fractions:
            _check_fractions(fractions, len(self.datasets))
        has_weights = any(entry.weight != 1 for entry in self.datasets)
        needs_lengths = fractions or has_weights or self.test_split_size is not None
        if self.streaming and needs_lengths:
            raise ValueError(
                "datasets: fractions, weights and test_split_size need lengths, so streaming must "
                "be false."
            )


def _check_test_split(share: float | None) -> None:
    if share is not None and not 0 < share < 1:
        raise ValueError(f"test_split_size={share} must be a share above 0 and below 1.")


def _check_fractions(fractions: list[float], dataset_count: int) -> None:
    if len(fractions) < dataset_count:
        raise ValueError("datasets: give a fraction to all of them or to none.")
    if min(fractions) < 0 or max(fractions) == 0:
        raise ValueError("datasets: fractions must not be negative, nor all of them 0.")


def _read_entry(index: int, entry: DatasetConfig | dict[str, Any]) -> DatasetConfig:
    """Check an entry of `datasets`; its index is for errors."""
    if not isinstance(entry, DatasetConfig):
        legal_names = [field.name for field in dataclasses.fields(DatasetConfig)]
        if not isinstance(entry, dict):
            raise ValueError(
                f"datasets[{index}]: {entry!r:.80} must be a mapping, such as "
                f"{{path: DATA.jsonl}}; fields are {', '.join(legal_names)}."
            )
        unknown = sorted(set(entry) - set(legal_names))
        if unknown or "path" not in entry:
            problem = f"unknown field {unknown[0]!r}" if unknown else "no path"
            raise ValueError(f"datasets[{index}]: {problem}; fields are {', '.join(legal_names)}.")
        entry = DatasetConfig(**_convert_numbers(index, entry))
    _check_values(index, entry)
    return entry


def _check_values(index: int, entry: DatasetConfig) -> None:
    if entry.weight <= 0:
        raise ValueError(f"datasets[{index}]: weight must be above 0, not {entry.weight}.")
    if entry.limit is not None and entry.limit < 1:
        raise ValueError(f"datasets[{index}]: limit must be above 0, not {entry.limit}.")
    if not isinstance(entry.columns, list | dict | None):
        raise ValueError(
            f"datasets[{index}]: columns must be a list of names, or a mapping of new columns to "
            f"texts such as '{{question}}', not {entry.columns!r:.80}."
        )


def _convert_numbers(index: int, entry: dict[str, Any]) -> dict[str, Any]:
    """Convert numbers that YAML reads as text, such as 1e3."""
    annotations = typing.get_type_hints(DatasetConfig)
    numbers = {}
    for name in ("fraction", "limit", "weight"):
        if name in entry:
            try:
                numbers[name] = convert(entry[name], annotations[name])
            except ConversionError as error:
                raise ValueError(f"datasets[{index}]: {name}: {error}.") from None
    return entry | numbers


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict | IterableDatasetDict:
    """Load and concatenate the datasets of a mixture.

    Limits are applied first, then fractions, then weights. With fractions, the mixture is as large
    as the scarcest dataset allows; the first rows of each dataset are taken.

    Returns:
        The split "train", and a split "test" if `test_split_size` is set.

    Raises:
        ValueError: the mixture is empty.
    """
    entries = mixture_config.datasets
    if not entries:
        raise ValueError("datasets is empty: name at least one.")
    loaded = [_load(entry, mixture_config.streaming) for entry in entries]
    if entries[0].fraction is not None:
        loaded = _take_fractions(loaded, [entry.fraction for entry in entries])
    names_sources = any(entry.source for entry in entries)
    weighted = []
    for dataset, entry in zip(loaded, entries, strict=True):
        dataset = _repeat_rows(dataset, entry.weight)
        weighted.append(_add_source_column(dataset, entry) if names_sources else dataset)
    combined = concatenate_datasets(weighted)
    if mixture_config.test_split_size is not None:
        return hold_out(combined, mixture_config.test_split_size)
    splits_class = IterableDatasetDict if mixture_config.streaming else DatasetDict
    return splits_class({"train": combined})


def hold_out(dataset: AnyDataset, share: float) -> DatasetDict:
    """Move a share of the rows from "train" to a new split "test".

    The rows are chosen at random, and are the same in every run.

    Raises:
        ValueError: the dataset is a stream, or has fewer than two rows.
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


def _load(entry: DatasetConfig, streaming: bool) -> AnyDataset:
    """Load one dataset of the mixture, with its limit and columns."""
    path = Path(entry.path).expanduser()
    # A name with the ending of a data file is not a hub id, so a missing file is an error at once.
    if path.is_file() or is_saved(path) or path.suffix in LOADER_OPTIONS:
        splits = load_dataset_source(entry.path, entry.name, streaming, "datasets: path")
        if entry.split not in splits:
            raise ValueError(
                f"datasets: split {entry.split!r}: {entry.path} has the splits {', '.join(splits)}."
            )
        dataset = splits[entry.split]
    else:
        subject = f"datasets: {entry.data_files or entry.path}"
        files = _local_files(entry.data_files)
        check_encoding(subject, files)
        with errors_naming_files(subject, files):
            dataset = load_dataset(
                path=entry.path,
                name=entry.name,
                data_dir=entry.data_dir,
                data_files=entry.data_files,
                split=entry.split,
                streaming=streaming,
            )
    if entry.limit is not None:
        dataset = dataset.take(entry.limit)
    if isinstance(entry.columns, dict):
        dataset = _replace_columns(dataset, entry.columns)
    elif entry.columns is not None:
        dataset = dataset.select_columns(entry.columns)
    return _use_plain_strings(dataset)


def _replace_columns(dataset: AnyDataset, templates: dict[str, Any]) -> AnyDataset:
    """Replace all columns by new ones that are filled from them."""
    names = dataset.column_names or [*next(iter(dataset), ())]
    try:
        fill_columns(dict.fromkeys(names, ""), templates)  # fails if a template names no column
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"datasets: columns={templates!r:.200}: {error} is no column; the dataset has "
            f"{', '.join(names)}. Write {{{{ and }}}} for braces."
        ) from None
    fill = partial(fill_columns, templates=templates)
    return dataset.map(fill, remove_columns=[name for name in names if name not in templates])


def fill_columns(row: dict[str, Any], templates: dict[str, Any]) -> dict[str, Any]:
    """Make new columns: fill the values of a row into text templates, also in nested messages.

    A missing value becomes empty text. White space around a filled text is removed.
    """
    values = {name: "" if value is None else value for name, value in row.items()}

    def fill(template: object) -> object:
        if isinstance(template, str):
            return template.format_map(values).strip()
        if isinstance(template, dict):
            return {name: fill(value) for name, value in template.items()}
        if isinstance(template, list):
            return [fill(value) for value in template]
        return template

    return {name: fill(template) for name, template in templates.items()}


def _use_plain_strings(dataset: AnyDataset) -> AnyDataset:
    """Convert columns of type "large_string", as CSV files have, to "string".

    Datasets with different types cannot be concatenated.
    """
    features = dataset.features or {}
    large = [name for name, feature in features.items() if feature == Value("large_string")]
    if not large:
        return dataset
    return dataset.cast(Features(features | dict.fromkeys(large, Value("string"))))


def _local_files(data_files: str | list[str] | dict[str, Any] | None) -> list[Path]:
    """Return the local files among data files. The others are URLs or patterns."""
    if isinstance(data_files, dict):
        return [file for files in data_files.values() for file in _local_files(files)]
    names = [data_files] if isinstance(data_files, str) else data_files or []
    return [path for path in map(Path, names) if path.is_file()]


def _repeat_rows(dataset: AnyDataset, weight: float) -> AnyDataset:
    """Repeat each row as often as the weight says; a remainder takes a random part of the rows."""
    if weight == 1:
        return dataset
    rows = len(dataset)
    repeats, remainder = divmod(round(weight * rows), max(rows, 1))
    chosen = np.random.default_rng(SPLIT_SEED).permutation(rows)[:remainder]
    return dataset.select([*range(rows)] * repeats + sorted(chosen.tolist()))


def _add_source_column(dataset: AnyDataset, entry: DatasetConfig) -> AnyDataset:
    name = entry.source or entry.name or entry.path.rstrip("/").split("/")[-1]
    return dataset.map(lambda row: {SOURCE_COLUMN: name})


def _take_fractions(datasets: list[AnyDataset], fractions: list[float]) -> list[AnyDataset]:
    """Take the first rows of each dataset, as many as possible in the given proportions."""
    shares = [fraction / sum(fractions) for fraction in fractions]
    pairs = list(zip(datasets, shares, strict=True))
    total = min(len(dataset) / share for dataset, share in pairs if share > 0)
    return [dataset.select(range(round(share * total))) for dataset, share in pairs]
