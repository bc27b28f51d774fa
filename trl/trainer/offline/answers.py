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
    unpaired: bool = False,
) -> AnswerDataset | ItemStream:
    """Encode preferences and cut them to length; what was cut is said.

    Args:
        dataset: any that `prepare_preferences` reads.
        encoder: how.
        args (`OfflineConfig`): options.
        limits (`PreferenceLimits`): how long prompts and answers may be.
        unpaired (`bool`): make each pair two items with a label.

    Raises:
        ValueError: if no example is left, or examples cannot be read.
    """
    old = sorted(set(dataset.column_names or ()) & set(OLD_NAMES))
    if old:
        words = ", ".join(f"{name} is now {OLD_NAMES[name]}" for name in old)
        warnings.warn(f"Columns of the dataset: {words}.", FutureWarning, stacklevel=2)
    table = prepare_preferences(dataset, encoder, unpaired, args.dataset_num_proc)
    if isinstance(table, IterableDataset):
        unpack = partial(_unpacked, limits=limits)
        return ItemStream(table, unpack, AnswerGroup.tokens)
    found = AnswerDataset(table, limits)
    for line in found.report.lines():
        logger.warning(line)
    return found


def _unpacked(row: dict[str, Any], limits: PreferenceLimits) -> list[AnswerGroup]:
    """The item of a row, unless an answer has no tokens, or it is to be left out."""
    found = answer_group(row, limits)
    longest = max(map(len, found.answer_ids)) + len(found.prompt_ids)
    fits = limits.drops_over is None or longest <= limits.drops_over
    return [found] if fits and all(found.answer_ids) else []
