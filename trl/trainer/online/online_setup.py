"""Prompts of a run: checked before anything is loaded, and in which order they come."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow as arrow
import pyarrow.compute as compute
from datasets import Dataset, IterableDataset, Value
from transformers import TrainerState
from transformers.utils import logging

from ...data.prompt_limit import PromptLimit
from ...data.sampler import RepeatIterableDataset, RepeatSampler
from ...online.prompts import PromptEncoder
from ...online.rewards import RewardSuite
from ...types import Prompts, Sampling
from .batch_math import check_eval_groups, smaller_round
from .online_config import OnlineConfig

logger = logging.get_logger(__name__)

PROMPT_COLUMNS = ("prompt", "chat_template_kwargs")
PROMPTS_AT_ONCE = 10_000
SEARCHED_ROWS = 100_000  # of the dataset, for a long prompt
Sampler = Callable[[Any], RepeatSampler]


def check_context(args: OnlineConfig, context: int | None) -> None:
    """Check that a completion leaves room for a prompt.

    Raises:
        ValueError: naming the largest legal value.
    """
    longest = args.max_completion_length or 0
    if context is not None and longest >= context:
        raise ValueError(
            f"max_completion_length={longest} leaves no room for a prompt: the model sees "
            f"{context} tokens. At most {context - 1} minus the longest prompt is possible."
        )


def prompt_limit(args: OnlineConfig, context: int | None) -> PromptLimit:
    """How long a prompt may be in a run whose policy sees `context` tokens.

    Raises:
        ValueError: if a completion leaves no room for any.
    """
    check_context(args, context)
    if args.use_vllm and args.vllm_max_model_length is not None:
        context = min(context or args.vllm_max_model_length, args.vllm_max_model_length)
    longest, completion = args.max_prompt_length, args.max_completion_length or 0
    return PromptLimit.of(longest, args.long_prompts, context, completion)


def checked_prompts(
    encode: PromptEncoder, train: Any, evaluation: Any, args: OnlineConfig
) -> tuple[Any, Any]:
    """Check the prompts of all datasets, and return the datasets with those that are left.

    Raises:
        ValueError: naming a row whose prompt cannot be used, or if too few are left.
    """
    train = encode.check("train_dataset", train)
    if not isinstance(train, IterableDataset):
        _check_size(len(train), args)
    found = {name: encode.check(name, dataset) for name, dataset in _named(evaluation).items()}
    if isinstance(evaluation, dict):
        return train, dict(zip(evaluation, found.values(), strict=True))
    return train, found.get("eval_dataset")


def warn_if_endless(sampling: Sampling) -> None:
    """Say so if no token ends a completion."""
    if not sampling.stop_ids:
        warnings.warn(
            "Neither the tokenizer nor the generation config of the model has an EOS token: "
            f"no completion ends before it has {sampling.max_tokens} tokens "
            "(max_completion_length). Set tokenizer.eos_token.",
            stacklevel=2,
        )


def check_datasets(train: Any, evaluation: Any, args: OnlineConfig) -> None:
    """Check kind, columns and size of the datasets.

    Raises:
        TypeError: if a dataset is not one of the `datasets` library.
        ValueError: if there is no training set, no `prompt` column, or too few rows, or if
            batches are to be loaded in a way that text cannot be.
    """
    if train is None:
        raise ValueError("train_dataset is required: a dataset with a 'prompt' column.")
    datasets = {"train_dataset": train} | _named(evaluation)
    for name, dataset in datasets.items():
        check_dataset(name, dataset)
        if isinstance(dataset, Dataset):
            _check_prompts(name, dataset)
    _check_loading(args)
    if not isinstance(train, IterableDataset):
        _check_size(len(train), args)
    elif args.max_steps <= 0:
        raise ValueError("An iterable train_dataset has no length: set max_steps above 0.")


def _check_prompts(name: str, dataset: Dataset) -> None:
    """Find rows that could not be encoded before they are drawn, maybe hours from now."""
    kind = dataset.features["prompt"]
    if isinstance(kind, Value) and kind.dtype not in ("string", "large_string", "null"):
        raise TypeError(
            f"{name}: the column 'prompt' must hold strings or lists of messages, not {kind.dtype}."
        )
    first = 0
    for batch in dataset.select_columns("prompt").with_format("arrow").iter(PROMPTS_AT_ONCE):
        prompts = batch["prompt"]
        row = compute.index(_absent(prompts), True).as_py()
        if row >= 0:
            what = "is missing" if prompts[row].as_py() is None else "has no messages"
            raise ValueError(
                f"{name}: the prompt of row {first + row} {what}. Remove such rows, for example "
                "with dataset.filter(lambda row: row['prompt'])."
            )
        first += len(prompts)


def _absent(prompts: Any) -> Any:
    """Mark prompts that are null or lists of nothing; an empty text may begin a completion."""
    if not (arrow.types.is_list(prompts.type) or arrow.types.is_large_list(prompts.type)):
        return compute.is_null(prompts)
    return compute.fill_null(compute.equal(compute.list_value_length(prompts), 0), True)


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


def check_longest_prompt(
    dataset: Any,
    encode: Callable[[Sequence[dict[str, Any]]], Prompts],
    args: OnlineConfig,
    context: int,
) -> None:
    """Look at the prompt with the most characters, before time is spent on the others.

    Args:
        dataset: that training draws from.
        encode: tokenizes the prompts of rows.
        args (`OnlineConfig`): `max_completion_length`.
        context (`int`): most tokens that a vLLM engine sees.

    Raises:
        ValueError: if the engine has no room for it and one more token.
    """
    if isinstance(dataset, IterableDataset):
        return
    completion = args.max_completion_length or 0
    prompts = dataset.select_columns("prompt")[:SEARCHED_ROWS]["prompt"]
    place = max(range(len(prompts)), key=lambda row: len(str(prompts[row])))
    length = len(encode([dataset[place]]).token_ids[0])
    words = (
        f"The prompt of row {place} of train_dataset has {length} tokens. With "
        f"max_completion_length={completion} that is more than the {context} that the vLLM engine "
        "sees"
    )
    if length >= context:
        raise ValueError(
            f"{words}, and leaves no room for a completion: raise vllm_max_model_length (of a "
            "server: --max_model_len) or leave out such prompts."
        )
    if length + completion > context:
        logger.warning(f"{words}: its completions are cut earlier.")


def _check_loading(args: OnlineConfig) -> None:
    """Each process reads its own rows: batches of text can be neither broadcast nor cut."""
    for name in ("dispatch_batches", "split_batches"):
        if getattr(args.accelerator_config, name):
            raise ValueError(
                f"accelerator_config.{name}=True cannot be used: rows are text, so each process "
                "must read its own batches. Leave it out."
            )


def dry_run(
    args: OnlineConfig,
    dataset: Any,
    encode: PromptEncoder,
    rewards: RewardSuite,
    state: TrainerState,
) -> None:
    """Find what is wrong with chat template, prompts or reward functions from one row."""
    if not args.reward_dry_run and isinstance(dataset, IterableDataset):
        return
    row = next(iter(dataset))
    encode([row])
    if args.remove_unused_columns:
        row = {name: row[name] for name in PROMPT_COLUMNS if name in row}
    if args.reward_dry_run:
        rewards.dry_run(row, state, args.group_size)


class PromptOrder:
    """Repeats the prompts of datasets for their groups.

    Args:
        args (`OnlineConfig`): batch sizes, seed, `shuffle_dataset`.
        encode (`PromptEncoder`): checks the prompts of datasets that are only evaluated.
    """

    def __init__(self, args: OnlineConfig, encode: PromptEncoder):
        self._args = args
        self._encode = encode
        self._training: RepeatSampler | RepeatIterableDataset | None = None

    def for_training(self, dataset: Any) -> tuple[Any, Sampler]:
        """The dataset as training reads it, and the order of its rows unless it is a stream."""
        if not isinstance(dataset, IterableDataset):
            return dataset, self._train_sampler
        plan, args = self._args.batch_plan, self._args
        prompts = plan.round_rows // plan.group_size
        if args.shuffle_dataset:
            dataset = dataset.shuffle(seed=args.seed)
        self._training = RepeatIterableDataset(
            dataset, plan.group_size, prompts, plan.micro_steps_per_round
        )
        return self._training, self._train_sampler

    def _train_sampler(self, dataset: Any) -> RepeatSampler:
        plan, args = self._args.batch_plan, self._args
        self._training = RepeatSampler(
            dataset,
            mini_repeat_count=plan.group_size,
            batch_size=plan.round_rows // plan.group_size,
            repeat_count=plan.micro_steps_per_round,
            shuffle=bool(args.shuffle_dataset),
            seed=args.seed,
        )
        return self._training

    def for_evaluation(self, dataset: Any) -> tuple[Any, Sampler]:
        """The dataset as evaluation reads it, and the order of its rows unless it is a stream.

        Raises:
            ValueError: if batches hold no whole groups, or a prompt cannot be used.
        """
        args = self._args
        group = args.eval_group_size
        check_eval_groups(args.eval_rows, args.world_size, group)
        check_dataset("eval_dataset", dataset)
        dataset = self._encode.check("eval_dataset", dataset)
        if isinstance(dataset, IterableDataset):
            dataset = RepeatIterableDataset(dataset, group, 1, 1)
        return dataset, partial(RepeatSampler, mini_repeat_count=group, seed=args.seed)

    def set_epoch(self, epoch: int) -> None:
        """Let training go on in the order of an epoch."""
        if self._training is not None:
            self._training.set_epoch(epoch)

    @contextmanager
    def reading(self, dataset: Any) -> Iterator[None]:
        """Make the loader of a stream without workers: each would read the whole of it."""
        alone = {
            "dataloader_num_workers": 0,
            "dataloader_persistent_workers": False,
            "dataloader_prefetch_factor": None,
        }
        usual = {name: getattr(self._args, name) for name in alone}
        chosen = alone if isinstance(dataset, RepeatIterableDataset) else {}
        try:
            for name, value in chosen.items():
                setattr(self._args, name, value)
            yield
        finally:
            for name, value in usual.items():
                setattr(self._args, name, value)
