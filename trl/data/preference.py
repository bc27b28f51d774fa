"""Preference pairs: finding their common prompt, and taking them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from datasets import Dataset, DatasetDict

D = TypeVar("D", Dataset, DatasetDict)


def extract_prompt(example: dict[str, Any]) -> dict[str, Any]:
    """Split what `chosen` and `rejected` have in common off as `prompt`.

    Args:
        example (`dict`): `chosen` and `rejected`, both strings or both lists of messages. A space
            at the end of a common string belongs to the completions. If one is the beginning of
            the other, its last element stays a completion, so that none is empty.
    """
    chosen, rejected = example["chosen"], example["rejected"]
    shared = common_prefix_length(chosen, rejected)
    if shared and shared == min(len(chosen), len(rejected)):
        shared -= 1
    if isinstance(chosen, str) and shared and chosen[shared - 1] == " ":
        shared -= 1
    return {
        "prompt": chosen[:shared],
        "chosen": chosen[shared:],
        "rejected": rejected[shared:],
    }


def common_prefix_length(ids: Sequence[Any], other: Sequence[Any]) -> int:
    """Count the items that two sequences of one type begin with alike."""
    low, high = 0, min(len(ids), len(other))
    # By halves: slices are compared many times faster than single items.
    while low < high:
        middle = (low + high + 1) // 2
        if ids[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def maybe_extract_prompt(example: dict[str, Any]) -> dict[str, Any]:
    """`extract_prompt` for pairs without a prompt of their format; others are unchanged."""
    if "chosen" not in example or "rejected" not in example:
        return example
    prompt, is_text = example.get("prompt"), isinstance(example["chosen"], str)
    has_prompt = prompt is not None and isinstance(prompt, str) == is_text
    return example if has_prompt else extract_prompt(example)


def unpair_preference_dataset(dataset: D, **map_kwargs: Any) -> D:
    """Turn each pair into two rows with a completion and a label.

    Of each batch the chosen rows come first (`label` True), then the rejected ones.

    Args:
        dataset: columns `chosen` and `rejected`; all others are kept for both rows.
        map_kwargs: arguments of `Dataset.map`.
    """

    def unpair(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        count = len(batch["chosen"])
        others = {k: v * 2 for k, v in batch.items() if k not in ("chosen", "rejected")}
        return others | {
            "completion": batch["chosen"] + batch["rejected"],
            "label": [True] * count + [False] * count,
        }

    return dataset.map(unpair, batched=True, remove_columns=["chosen", "rejected"], **map_kwargs)


def maybe_unpair_preference_dataset(
    dataset: D, num_proc: int | None = None, desc: str | None = None
) -> D:
    """`unpair_preference_dataset` for datasets with both columns; others are unchanged."""
    one = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
    # A stream may know its columns only from its rows.
    if not {"chosen", "rejected"} <= set(one.column_names or next(iter(one), ())):
        return dataset
    options = {k: v for k, v in {"num_proc": num_proc, "desc": desc}.items() if v is not None}
    return unpair_preference_dataset(dataset, **options)
