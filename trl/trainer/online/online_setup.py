"""Prompts of a run: their checks before anything is loaded, and their order."""

import warnings
from dataclasses import replace
from typing import Any

from datasets import Dataset, IterableDataset
from torch import nn
from transformers import PreTrainedTokenizerBase

from ...distributed import Ranks
from ...models.loading import context_length, model_bounds
from ...number_format import pluralize
from ...online.prompts import PromptEncoder, PromptLimit, check_forms
from ...online.rewards import ARGUMENTS
from ...online.sampler import RepeatIterableDataset, RepeatSampler
from ...types import Mode
from ..base.policy import EvalDataset, TrainDataset, check_dataset
from .batch_math import check_eval_groups, smaller_round
from .online_config import OnlineConfig


def prompt_limit(args: OnlineConfig, context: int | None) -> PromptLimit:
    """How long a prompt may be in a run whose policy sees `context` tokens."""
    completion = args.max_completion_length
    if context is not None and completion >= context:
        raise ValueError(
            f"max_completion_length={completion} leaves no room for a prompt: the model sees "
            f"{context} tokens. At most {context - 1} minus the longest prompt is possible."
        )
    if args.use_vllm and args.vllm_max_model_length is not None:
        context = min(context or args.vllm_max_model_length, args.vllm_max_model_length)
    limit = PromptLimit.of(args.max_prompt_length, args.long_prompts, context, completion)
    # vLLM itself ends completions at its context, and warns.
    return limit if args.use_vllm else replace(limit, completion=completion)


def prompt_encoder(
    args: OnlineConfig,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict[str, Any],
    ranks: Ranks,
) -> PromptEncoder:
    """What encodes the prompts of a run for its policy, and refuses those that it cannot read."""
    limit = prompt_limit(args, context_length(model))
    return PromptEncoder(tokenizer, template_kwargs, limit, model_bounds(model), ranks)


def with_prompts(dataset: EvalDataset, tokenizer: PreTrainedTokenizerBase | None) -> EvalDataset:
    """A dataset, decoded if it was tokenized beforehand: if it has `input_ids` but no `prompt`."""
    if not isinstance(dataset, Dataset | IterableDataset):
        return dataset
    columns = dataset.column_names or ()
    if "input_ids" not in columns or "prompt" in columns:
        return dataset
    if tokenizer is None:
        raise ValueError(
            "The dataset has input_ids but no prompt: pass the tokenizer as processing_class, or a "
            "dataset with a 'prompt' column."
        )
    words = "A dataset with input_ids is decoded; pass a 'prompt' column instead."
    warnings.warn(words, FutureWarning, stacklevel=4)
    return dataset.map(lambda row: {"prompt": tokenizer.decode(row["input_ids"])})


def check_datasets(train: TrainDataset | None, evaluation: EvalDataset, args: OnlineConfig) -> None:
    """Check kind, columns, size and prompts of the datasets, before a model is loaded."""
    if train is None:
        raise ValueError("train_dataset is required: a dataset with a 'prompt' column.")
    for name, dataset in {"train_dataset": train, **_named(evaluation)}.items():
        _check_prompts(name, dataset)
    loader_config = args.accelerator_config
    unusable = {
        "dispatch_batches": loader_config.dispatch_batches,
        "split_batches": loader_config.split_batches,
    }
    for name, is_set in unusable.items():
        if is_set:
            raise ValueError(
                f"accelerator_config.{name}=True cannot be used: rows are text, so each process "
                "must read its own batches. Leave it out."
            )
    if not isinstance(train, IterableDataset):
        _check_size(len(train), args)
    elif args.max_steps <= 0:
        raise ValueError("An iterable train_dataset has no length: set max_steps above 0.")


def checked_prompts(
    encode: PromptEncoder, train: TrainDataset, evaluation: EvalDataset, args: OnlineConfig
) -> tuple[TrainDataset, EvalDataset]:
    """Check the prompts of all datasets, and return the datasets with those that are left."""
    train = encode.check("train_dataset", train)
    if not isinstance(train, IterableDataset):
        _check_size(len(train), args)
    found = {name: encode.check(name, dataset) for name, dataset in _named(evaluation).items()}
    if isinstance(evaluation, dict):
        return train, dict(zip(evaluation, found.values(), strict=True))
    return train, found.get("eval_dataset")


def _named(evaluation: EvalDataset) -> dict[str, Any]:
    if isinstance(evaluation, dict):
        return {f"eval_dataset[{name!r}]": dataset for name, dataset in evaluation.items()}
    return {} if evaluation is None else {"eval_dataset": evaluation}


def _check_prompts(name: str, dataset: TrainDataset) -> None:
    check_dataset(name, dataset)
    columns = dataset.column_names
    if columns is not None and "prompt" not in columns:
        raise ValueError(f"{name} has no 'prompt' column; it has {', '.join(columns)}.")
    for column in [column for column in ARGUMENTS if column in (columns or ())]:
        warnings.warn(
            f"{name}: reward functions do not get the column {column!r}, because their argument of "
            f"this name is something else. Rename it: dataset.rename_column({column!r}, "
            f"'dataset_{column}').",
            stacklevel=2,
        )
    if not isinstance(dataset, IterableDataset):  # a stream is checked as it is read
        check_forms(name, dataset)


def _check_size(size: int, args: OnlineConfig) -> None:
    plan = args.batch_plan
    needed = plan.round_rows // plan.group_size
    if size < needed:
        raise ValueError(
            f"train_dataset has {pluralize(size, 'row')}, but one generation round takes "
            f"{pluralize(needed, 'prompt')} x {pluralize(plan.group_size, 'completion')}. "
            f"Add rows{smaller_round(plan, size)}."
        )


def repeated(dataset: TrainDataset, mode: Mode, args: OnlineConfig, encode: PromptEncoder) -> Any:
    """A dataset as it is read, and what has the order of its prompts, repeated for their groups."""
    plan, shuffles = args.batch_plan, args.shuffle_dataset or mode == "eval"
    repeats = plan.group_size, plan.round_rows // plan.group_size, plan.micro_steps_per_round
    if mode == "eval":
        repeats = args.group_size_in(mode), 1, 1
        check_eval_groups(args.eval_rows, args.world_size, args.group_size_in(mode))
        _check_prompts("eval_dataset", dataset)
        dataset = encode.check("eval_dataset", dataset)
    if not isinstance(dataset, IterableDataset):
        return dataset, RepeatSampler(dataset, *repeats, shuffle=bool(shuffles), seed=args.seed)
    if mode == "train" and shuffles:
        dataset = dataset.shuffle(seed=args.seed)
    stream = RepeatIterableDataset(dataset, *repeats)
    return stream, stream
