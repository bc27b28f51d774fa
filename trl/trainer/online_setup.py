"""Checks made before anything is loaded."""

from __future__ import annotations

from typing import Any

from datasets import Dataset, IterableDataset

from .online_config import OnlineConfig

NOT_YET = {
    "use_vllm": "generation with vLLM",
    "use_transformers_continuous_batching": "continuous batching",
}


def refuse_unavailable(args: OnlineConfig) -> None:
    """Refuse options whose feature is not part of this release.

    Raises:
        NotImplementedError: naming the option.
    """
    for name, feature in NOT_YET.items():
        if getattr(args, name):
            raise NotImplementedError(
                f"{name}=True: {feature} is not available in this release; leave the option out "
                "to generate with transformers."
            )


def check_datasets(train: Any, evaluation: Any, args: OnlineConfig) -> None:
    """Check kind, columns and size of the datasets.

    Raises:
        TypeError: if a dataset is none of the `datasets` library.
        ValueError: if there is no training set, no `prompt` column, or too few rows.
    """
    if train is None:
        raise ValueError("train_dataset is required: a dataset with a 'prompt' column.")
    _check_one("train_dataset", train)
    if isinstance(evaluation, dict):
        for name, dataset in evaluation.items():
            _check_one(f"eval_dataset[{name!r}]", dataset)
    elif evaluation is not None:
        _check_one("eval_dataset", evaluation)
    evaluations = evaluation.values() if isinstance(evaluation, dict) else [evaluation]
    if any(isinstance(dataset, IterableDataset) for dataset in (train, *evaluations)):
        _prepare_streams(args)
    if isinstance(train, IterableDataset):
        if args.max_steps <= 0:
            raise ValueError("An iterable train_dataset has no length: set max_steps above 0.")
        return
    group_size = args.group_size
    needed = args.batch_plan.round_rows // group_size
    if len(train) < needed:
        rows = len(train) * group_size
        raise ValueError(
            f"train_dataset has {len(train)} rows, but one generation round takes {needed} "
            f"prompts x {group_size} completions. Add rows, or lower "
            f"generation_batch_size to at most {rows}."
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
