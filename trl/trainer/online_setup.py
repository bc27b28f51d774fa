"""Checks made before anything is loaded."""

from __future__ import annotations

from typing import Any

from datasets import Dataset, IterableDataset

from .online_config import OnlineConfig


def check_datasets(train: Any, evaluation: Any, args: OnlineConfig) -> None:
    """Check kind, columns and size of the datasets.

    Raises:
        TypeError: if a dataset is none of the `datasets` library.
        ValueError: if there is no training set, no `prompt` column, or too few rows.
    """
    if train is None:
        raise ValueError("train_dataset is required: a dataset with a 'prompt' column.")
    datasets = {"train_dataset": train} | _named(evaluation)
    for name, dataset in datasets.items():
        _check_one(name, dataset)
    if any(isinstance(dataset, IterableDataset) for dataset in datasets.values()):
        _prepare_streams(args)
    if not isinstance(train, IterableDataset):
        _check_size(len(train), args)
    elif args.max_steps <= 0:
        raise ValueError("An iterable train_dataset has no length: set max_steps above 0.")


def _named(evaluation: Any) -> dict[str, Any]:
    if isinstance(evaluation, dict):
        return {f"eval_dataset[{name!r}]": dataset for name, dataset in evaluation.items()}
    return {} if evaluation is None else {"eval_dataset": evaluation}


def _check_size(size: int, args: OnlineConfig) -> None:
    group_size = args.group_size
    needed = args.batch_plan.round_rows // group_size
    if size < needed:
        raise ValueError(
            f"train_dataset has {size} rows, but one generation round takes {needed} prompts x "
            f"{group_size} completions. Add rows, or lower generation_batch_size to at most "
            f"{size * group_size}."
        )


def _check_one(name: str, dataset: Any) -> None:
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


def _prepare_streams(args: OnlineConfig) -> None:
    """Let each process read its own rows; batches of text cannot be broadcast as tensors."""
    if args.accelerator_config.dispatch_batches:
        raise ValueError(
            "accelerator_config.dispatch_batches=True cannot be used with iterable datasets: "
            "rows are text, so each process must read its own. Set it to False."
        )
    args.accelerator_config.dispatch_batches = False
    args.dataloader_num_workers = 0
