"""Mixing several datasets into one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from datasets import (
    Dataset,
    DatasetDict,
    IterableDatasetDict,
    concatenate_datasets,
    load_dataset,
)

# All processes of a run, and a continued run, must keep the same rows for evaluation.
SPLIT_SEED = 0


@dataclass
class DatasetConfig:
    """One dataset of a mixture; the fields are those of `datasets.load_dataset`."""

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclass
class DatasetMixtureConfig:
    """Datasets to concatenate, with their shares.

    Args:
        datasets (`list`): mappings with the fields of `DatasetConfig`.
        streaming (`bool`): read rows as they are needed.
        test_split_size (`float`, *optional*): share of rows to keep for evaluation; they are
            chosen at random, and are the same in every run.

    Raises:
        ValueError: if only some datasets have a fraction, if fractions are not positive, or if
            fractions or a test split meet streaming.
    """

    datasets: list[Any] = field(
        default_factory=list,
        metadata={"help": "Datasets to mix, in a configuration file: path, split, fraction, ..."},
    )
    streaming: bool = field(default=False, metadata={"help": "Stream the mixed datasets."})
    test_split_size: float | None = field(
        default=None, metadata={"help": "Share of the mixture to keep for evaluation."}
    )

    def __post_init__(self) -> None:
        self.datasets = [_entry(place, entry) for place, entry in enumerate(self.datasets)]
        shares = [entry.fraction for entry in self.datasets if entry.fraction is not None]
        if shares:
            _check_shares(shares, len(self.datasets))
        if self.streaming and (shares or self.test_split_size is not None):
            raise ValueError(
                "datasets: fractions and test_split_size need lengths, so streaming must be false."
            )


def _check_shares(shares: list[float], count: int) -> None:
    if len(shares) < count:
        raise ValueError("datasets: give a fraction to all of them or to none.")
    if min(shares) < 0 or max(shares) == 0:
        raise ValueError("datasets: fractions must not be negative, and at least one above 0.")


def _entry(place: int, entry: Any) -> DatasetConfig:
    if isinstance(entry, DatasetConfig):
        return entry
    legal = [f.name for f in dataclasses.fields(DatasetConfig)]
    unknown = sorted(set(entry) - set(legal))
    if unknown or "path" not in entry:
        problem = f"unknown field {unknown[0]!r}" if unknown else "no path"
        raise ValueError(f"datasets[{place}]: {problem}; fields are {', '.join(legal)}.")
    return DatasetConfig(**entry)


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict | IterableDatasetDict:
    """Load and concatenate the datasets of a mixture.

    With fractions, as many rows are taken as the scarcest dataset allows, the first ones of each.

    Returns:
        "train", and "test" if `test_split_size` is set.

    Raises:
        ValueError: if the mixture is empty.
    """
    entries = mixture_config.datasets
    if not entries:
        raise ValueError("The mixture names no datasets.")
    loaded = [_load(entry, mixture_config.streaming) for entry in entries]
    if entries[0].fraction is not None:
        loaded = _take_fractions(loaded, [entry.fraction for entry in entries])
    combined = concatenate_datasets(loaded)
    if mixture_config.test_split_size is not None:
        return combined.train_test_split(mixture_config.test_split_size, seed=SPLIT_SEED)
    kind = IterableDatasetDict if mixture_config.streaming else DatasetDict
    return kind({"train": combined})


def _load(entry: DatasetConfig, streaming: bool) -> Any:
    dataset = load_dataset(
        entry.path,
        name=entry.name,
        data_dir=entry.data_dir,
        data_files=entry.data_files,
        split=entry.split,
        streaming=streaming,
    )
    return dataset if entry.columns is None else dataset.select_columns(entry.columns)


def _take_fractions(datasets: list[Dataset], fractions: list[float]) -> list[Dataset]:
    weights = [fraction / sum(fractions) for fraction in fractions]
    pairs = list(zip(datasets, weights, strict=True))
    total = min(len(dataset) / weight for dataset, weight in pairs if weight > 0)
    return [dataset.select(range(round(weight * total))) for dataset, weight in pairs]
