"""Datasets of preferences as items: prompts with the answers that share them."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

from datasets import Dataset, IterableDataset
from transformers.utils import logging

from ...data.answer_rows import AnswerDataset, AnswerGroup, answer_group
from ...data.encode import TextEncoder
from ...data.preference_rows import OLD_NAMES, PreferenceLimits, prepare_preferences
from .batches import ItemStream
from .offline_config import OfflineConfig

logger = logging.get_logger(__name__)


def prepare_answers(
    dataset: Dataset | IterableDataset,
    encoder: TextEncoder,
    args: OfflineConfig,
    limits: PreferenceLimits,
    *,
    unpaired: bool = False,
    drop_long: bool = False,
) -> AnswerDataset | ItemStream:
    """Encode preferences and cut them to length; what was cut is said.

    Args:
        dataset: any that `prepare_preferences` reads.
        encoder: how.
        args (`OfflineConfig`): options.
        limits (`PreferenceLimits`): how long prompts and answers may be.
        unpaired (`bool`): make each pair two items with a label.
        drop_long (`bool`): leave out what is over `max_length` instead of cutting it.

    Raises:
        ValueError: if no example is left, or examples cannot be read.
    """
    old = sorted(set(dataset.column_names or ()) & set(OLD_NAMES))
    if old:
        words = ", ".join(f"{name} is now {OLD_NAMES[name]}" for name in old)
        warnings.warn(f"Columns of the dataset: {words}.", FutureWarning, stacklevel=2)
    table = prepare_preferences(dataset, encoder, unpaired, args.dataset_num_proc)
    if isinstance(table, IterableDataset):
        unpack = partial(_unpacked, limits=limits, drop_long=drop_long)
        return ItemStream(table, unpack, AnswerGroup.tokens)
    found = AnswerDataset(table, limits, drop_long)
    for line in found.report.lines():
        logger.warning(line)
    return found


def _unpacked(row: dict[str, Any], limits: PreferenceLimits, drop_long: bool) -> list[AnswerGroup]:
    """The item of a row, unless an answer has no tokens."""
    found = answer_group(row, PreferenceLimits() if drop_long else limits)
    longest = max(map(len, found.answer_ids)) + len(found.prompt_ids)
    is_long = drop_long and limits.max_length is not None and longest > limits.max_length
    return [found] if all(found.answer_ids) and not is_long else []
