"""A rank's micro-batches of a stream, prepared preferences, and predictions by row."""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from torch import Tensor
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers.utils import logging

from ...data.encode import TextEncoder
from ...data.packing import MicroBatchSampler, share_of_rank
from ...data.preference_rows import (
    ANYONE,
    OLD_NAMES,
    AnswerDataset,
    Learner,
    PreferenceLimits,
    prepare_preferences,
)
from ...data.prepare import ItemDataset, items_of
from ...data.rows import AnswerRows
from ...distributed import Ranks
from ...ops.masking import pad_ragged
from .offline_config import OfflineConfig

logger = logging.get_logger(__name__)

PACKED_AT_ONCE = 1000  # items of a stream


@dataclass(eq=False)
class ItemStream(TorchIterableDataset):  # type: ignore[type-arg]
    """Micro-batches of one rank, of a stream of prepared rows that every rank reads in each epoch.

    `cut` makes items of some rows, and `arrange` others of all of these. A micro-batch has so many
    rows, items or packs of them; `limits` and `place` are as for `MicroBatchSampler`.
    """

    rows: IterableDataset
    cut: Callable[[Dataset], ItemDataset]
    arrange: Callable[[Iterator[Any]], Iterator[Any]] = iter
    limits: tuple[int, int | None, int | None] = (1, None, None)  # rows, tokens, those of a pack
    place: tuple[int, int] = (0, 1)

    def set_epoch(self, epoch: int) -> None:
        self.rows.set_epoch(epoch)

    def _items(self, at_once: int) -> Iterator[Any]:
        losses = Counter[str]()
        for table in self.rows.with_format("arrow").iter(at_once):
            yield from items_of(table, self.cut, losses)
        if said := "; ".join(f"{number:,} {fate}" for fate, number in losses.items() if number):
            logger.warning(f"Rows of the stream: {said}.")

    def __iter__(self) -> Iterator[list[Any]]:
        rank, ranks = self.place
        # Packs fit the better, the more items there are to choose from.
        at_once = 2 * self.limits[0] * ranks if self.limits[2] is None else PACKED_AT_ONCE
        held: list[Any] = []
        items, is_over = self.arrange(self._items(at_once)), False
        while not is_over:
            read = list(islice(items, at_once))
            is_over = len(read) < at_once
            held = held + read
            batches = MicroBatchSampler([x.tokens() for x in held], *self.limits).batches()
            # The last micro-batch may still grow.
            ready = len(batches) if is_over else max(len(batches) - 1, 0) // ranks * ranks
            for batch in share_of_rank(batches[:ready], rank, ranks):
                yield [held[i] if i >= 0 else replace(held[~i], counts=False) for i in batch]
            held = [held[i] for batch in batches[ready:] for i in batch]


def prepare_answers(
    dataset: Dataset | IterableDataset,
    encoder: TextEncoder,
    args: OfflineConfig,
    limits: PreferenceLimits,
    unpaired: bool = False,
    learner: Learner = ANYONE,
) -> AnswerDataset | ItemStream:
    """Encode preferences, cut them to length, say what was cut; it is an error if none is left."""
    if old := sorted(set(dataset.column_names or ()) & set(OLD_NAMES)):
        words = ", ".join(f"{name} is now {OLD_NAMES[name]}" for name in old)
        warnings.warn(f"Columns of the dataset: {words}.", FutureWarning, stacklevel=2)
    table = prepare_preferences(dataset, encoder, unpaired, args.dataset_num_proc, learner)
    if isinstance(table, IterableDataset):
        return ItemStream(table, partial(AnswerDataset, limits=limits, bounds=encoder.bounds))
    return AnswerDataset(table, limits, encoder.bounds).checked(str(limits))


class Predictions:
    """Values of answers, collected by the row of the dataset that they are of."""

    def __init__(self) -> None:
        self._found: list[tuple[int, bool, dict[str, list[float]]]] = []

    def add(self, rows: AnswerRows, values: dict[str, Tensor]) -> None:
        """Take values (B, K) of some rows, by name."""
        columns = {name: column.detach().tolist() for name, column in values.items()}
        for place, group in enumerate(rows.items):
            if group.counts:
                known = {n: column[place][: len(group.answer_ids)] for n, column in columns.items()}
                self._found.append((group.source, not group.values.get("label", True), known))

    def table(self, ranks: Ranks, rows: int | None) -> dict[str, np.ndarray]:
        """All values (rows, K) by name; NaN for rows that were left out, and missing answers.

        Each of the `ranks` has a share. `rows` are those of the dataset; None: all that are known.
        """
        shares = ranks.gather_objects(self._found)[:: ranks.per_row]
        columns: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        # The desirable answer of a pair first.
        for source, _, known in sorted(chain(*shares), key=itemgetter(0, 1)):
            for name, values in known.items():
                columns[name][source] += values
        count = rows or max((source + 1 for source, *_ in chain(*shares)), default=0)
        return {
            name: pad_ragged([by_row[row] for row in range(count)], np.nan).numpy()
            for name, by_row in columns.items()
        }
