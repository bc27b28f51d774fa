"""Prompts of a run: checked before anything is loaded, and in which order they come."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from datasets import IterableDataset
from transformers import TrainerState
from transformers.utils import logging

from ...data.prompt_limit import PromptLimit
from ...data.sampler import RepeatIterableDataset, RepeatSampler
from ...online.prompts import PromptEncoder
from ...online.rewards import RewardSuite
from ...text import count
from ...types import Sampling
from ..base.policy import check_dataset
from .batch_math import check_eval_groups, smaller_round
from .online_config import OnlineConfig

logger = logging.get_logger(__name__)

PROMPT_COLUMNS = ("prompt", "chat_template_kwargs")


# --- Lengths ---


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


def check_engine_context(
    args: OnlineConfig, context: int, longest: tuple[int, int] = (0, 0)
) -> None:
    """Check that a vLLM engine has room for a completion, and for a token after any prompt.

    Args:
        context (`int`): most tokens that it sees.
        longest (`tuple`): tokens and row of the longest prompt.

    Raises:
        ValueError: naming the options.
    """
    completion, (length, row) = args.max_completion_length or 0, longest
    if context <= completion:
        raise ValueError(
            f"The vLLM engine sees {context} tokens, but max_completion_length={completion} leaves "
            f"no room for a prompt: set vllm_max_model_length to {completion} and the longest "
            f"prompt, or max_completion_length below {context}."
        )
    words = (
        f"The prompt of row {row} of train_dataset has {length} tokens. With "
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


def warn_if_endless(sampling: Sampling) -> None:
    """Say so if no token ends a completion."""
    if not sampling.stop_ids:
        warnings.warn(
            "Neither the tokenizer nor the generation config of the model has an EOS token: "
            f"no completion ends before it has {sampling.max_tokens} tokens "
            "(max_completion_length). Set tokenizer.eos_token.",
            stacklevel=2,
        )


# --- Datasets ---


def check_datasets(train: Any, evaluation: Any, args: OnlineConfig) -> None:
    """Check kind, columns and size of the datasets, before a model is loaded.

    Raises:
        TypeError: if a dataset is not one of the `datasets` library.
        ValueError: if there is no training set, no `prompt` column, or too few rows, or if
            batches are to be loaded in a way that text cannot be.
    """
    if train is None:
        raise ValueError("train_dataset is required: a dataset with a 'prompt' column.")
    for name, dataset in {"train_dataset": train, **_named(evaluation)}.items():
        _check_prompts(name, dataset)
    for name in ("dispatch_batches", "split_batches"):
        if getattr(args.accelerator_config, name):
            raise ValueError(
                f"accelerator_config.{name}=True cannot be used: rows are text, so each process "
                "must read its own batches. Leave it out."
            )
    if not isinstance(train, IterableDataset):
        _check_size(len(train), args)
    elif args.max_steps <= 0:
        raise ValueError("An iterable train_dataset has no length: set max_steps above 0.")


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


def _named(evaluation: Any) -> dict[str, Any]:
    if isinstance(evaluation, dict):
        return {f"eval_dataset[{name!r}]": dataset for name, dataset in evaluation.items()}
    return {} if evaluation is None else {"eval_dataset": evaluation}


def _check_prompts(name: str, dataset: Any) -> None:
    check_dataset(name, dataset)
    columns = dataset.column_names
    if columns is not None and "prompt" not in columns:
        raise ValueError(f"{name} has no 'prompt' column; it has {', '.join(columns)}.")


def _check_size(size: int, args: OnlineConfig) -> None:
    plan = args.batch_plan
    needed = plan.round_rows // plan.group_size
    if size < needed:
        raise ValueError(
            f"train_dataset has {count(size, 'row')}, but one generation round takes {needed} "
            f"prompts x {plan.group_size} completions. Add rows{smaller_round(plan, size)}."
        )


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

    def for_training(self, dataset: Any) -> tuple[Any, Any]:
        """The dataset as training reads it, and what makes the order of its rows; no stream's."""
        plan, args = self._args.batch_plan, self._args
        prompts, passes = plan.round_rows // plan.group_size, plan.micro_steps_per_round

        def sampler(rows: Any) -> RepeatSampler:
            shuffles = bool(args.shuffle_dataset)
            self._training = RepeatSampler(
                rows, plan.group_size, prompts, passes, shuffle=shuffles, seed=args.seed
            )
            return self._training

        if isinstance(dataset, IterableDataset):
            if args.shuffle_dataset:
                dataset = dataset.shuffle(seed=args.seed)
            dataset = RepeatIterableDataset(dataset, plan.group_size, prompts, passes)
            self._training = dataset
        return dataset, sampler

    def for_evaluation(self, dataset: Any) -> tuple[Any, Any]:
        """The dataset as evaluation reads it, and what makes the order of its rows; no stream's.

        Raises:
            ValueError: if batches hold no whole groups, or a prompt cannot be used.
        """
        args = self._args
        group = args.eval_group_size
        check_eval_groups(args.eval_rows, args.world_size, group)
        _check_prompts("eval_dataset", dataset)
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
        alone: dict[str, Any] = {
            "dataloader_num_workers": 0,
            "dataloader_persistent_workers": False,
            "dataloader_prefetch_factor": None,
        }
        usual = {name: getattr(self._args, name) for name in alone}
        chosen = alone if isinstance(dataset, RepeatIterableDataset) else usual
        try:
            for name, value in chosen.items():
                setattr(self._args, name, value)
            yield
        finally:
            for name, value in usual.items():
                setattr(self._args, name, value)
