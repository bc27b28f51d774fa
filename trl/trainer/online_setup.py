"""Checks made before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from datasets import Dataset, IterableDataset

from .batch_math import smaller_round
from .online_config import OnlineConfig


def check_datasets(train: Any, evaluation: Any, args: OnlineConfig) -> None:
    """Check kind, columns and size of the datasets.

    Raises:
        TypeError: if a dataset is none of the `datasets` library.
        ValueError: if there is no training set, no `prompt` column, or too few rows, or if
            batches are to be loaded in a way that text cannot be.
    """
    if train is None:
        raise ValueError("train_dataset is required: a dataset with a 'prompt' column.")
    datasets = {"train_dataset": train} | _named(evaluation)
    for name, dataset in datasets.items():
        check_dataset(name, dataset)
    _check_loading(args)
    if not isinstance(train, IterableDataset):
        _check_size(len(train), args)
    elif args.max_steps <= 0:
        raise ValueError("An iterable train_dataset has no length: set max_steps above 0.")


def _named(evaluation: Any) -> dict[str, Any]:
    if isinstance(evaluation, dict):
        return {f"eval_dataset[{name!r}]": dataset for name, dataset in evaluation.items()}
    return {} if evaluation is None else {"eval_dataset": evaluation}


def _check_size(size: int, args: OnlineConfig) -> None:
    plan = args.batch_plan
    needed = plan.round_rows // plan.group_size
    if size < needed:
        raise ValueError(
            f"train_dataset has {size} rows, but one generation round takes {needed} prompts x "
            f"{plan.group_size} completions. Add rows, or lower {smaller_round(plan, size)}."
        )


def check_dataset(name: str, dataset: Any) -> None:
    """Check kind and columns of one dataset; `name` is what messages call it."""
    if not isinstance(dataset, (Dataset, IterableDataset)):
        raise TypeError(
            f"{name} must be a datasets.Dataset or IterableDataset, not {type(dataset).__name__}."
        )
    columns = dataset.column_names
    if columns is not None and "prompt" not in columns:
        raise ValueError(f"{name} has no 'prompt' column; it has {', '.join(columns)}.")
    images = {"image", "images"} & set(columns or ())
    if images:
        raise NotImplementedError(
            f"{name} has the column {images.pop()!r}: prompts with images are not available in "
            "this release. Remove the column to train on text."
        )


def _check_loading(args: OnlineConfig) -> None:
    """Each process reads its own rows: batches of text can be neither broadcast nor cut."""
    for name in ("dispatch_batches", "split_batches"):
        if getattr(args.accelerator_config, name):
            raise ValueError(
                f"accelerator_config.{name}=True cannot be used: rows are text, so each process "
                "must read its own batches. Leave it out."
            )


@contextmanager
def reading_in_this_process(args: OnlineConfig) -> Iterator[None]:
    """Make loaders without workers: each would read the whole of a stream."""
    alone = {
        "dataloader_num_workers": 0,
        "dataloader_persistent_workers": False,
        "dataloader_prefetch_factor": None,
    }
    usual = {name: getattr(args, name) for name in alone}
    try:
        for name, value in alone.items():
            setattr(args, name, value)
        yield
    finally:
        for name, value in usual.items():
            setattr(args, name, value)
