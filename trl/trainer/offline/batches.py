"""Prepared items of datasets and streams, and which of them go into the micro-batches of each rank.

Items of preferences are prompts with the answers that share them. For KTO's KL estimate, answers
are also scored under the prompts of other examples.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, zip_longest
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
from datasets import Dataset, IterableDataset
from torch import Tensor
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers.utils import logging

from ...data.encode import TextEncoder
from ...data.packing import MicroBatchSampler, share_of_rank
from ...data.preference_rows import (
    OLD_NAMES,
    AnswerDataset,
    PreferenceLimits,
    answer_group,
    mismatched,
    prepare_preferences,
)
from ...data.prepare import CUT, LEFT_OUT, count_loss
from ...data.rows import AnswerGroup, AnswerRows, uncounted
from ...distributed import Ranks
from .offline_config import OfflineConfig

logger = logging.get_logger(__name__)

PACKED_AT_ONCE = 1000  # items of a stream
BUFFERED = 10_000  # rows of a stream that is shuffled
LOOKED_BACK = 64  # items of a stream among which a partner is looked for
Item = TypeVar("Item")


class ItemStream(TorchIterableDataset):  # type: ignore[type-arg]
    """Prepared items of a stream of rows, which is read anew for each epoch.

    `unpack` makes the items of a row, or none, to leave it out; `size` says their tokens.
    """

    def __init__(
        self,
        rows: IterableDataset,
        unpack: Callable[[dict[str, Any]], Sequence[Item]],
        size: Callable[[Item], int],
    ):
        self.rows, self.size, self.unpack = rows, size, unpack

    def shuffle(self, seed: int) -> None:
        """Read rows in another order in each epoch, from a buffer."""
        self.rows = self.rows.shuffle(seed=seed, buffer_size=BUFFERED)

    def __iter__(self) -> Iterator[Any]:
        losses, merged = Counter[str](), 0
        for row in self.rows:
            items = self.unpack(row)
            count_loss(row, sum(map(self.size, items)), losses)
            merged += row["merged"] > 0
            yield from items
        if losses or merged:
            logger.warning(
                f"Rows of the stream that were left out: {losses[LEFT_OUT]}; cut to length: "
                f"{losses[CUT]}; with a token that stands for characters of both the prompt and "
                f"what is trained on: {merged}."
            )


class StreamBatches(TorchIterableDataset):  # type: ignore[type-arg]
    """The micro-batches of one rank of a stream, which every rank reads.

    A micro-batch has so many `rows`, items or packs of them; the rest is as for `RankBatches`.
    """

    def __init__(
        self,
        items: ItemStream,
        rows: int,
        max_tokens: int | None,
        pack_size: int | None,
        place: tuple[int, int],
    ):
        self._items, self._limits, self._place = items, (rows, max_tokens, pack_size), place
        # Packs fit the better, the more items there are to choose from.
        self._at_once = 2 * rows * place[1] if pack_size is None else PACKED_AT_ONCE

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the stream."""
        self._items.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        rank, ranks = self._place
        held: list[Any] = []
        source, is_over = iter(self._items), False
        while not is_over:
            read = list(islice(source, self._at_once))
            is_over = len(read) < self._at_once
            held = held + read
            sizes = list(map(self._items.size, held))
            batches = MicroBatchSampler(sizes, *self._limits).batches()
            # The last micro-batch may still grow.
            ready = len(batches) if is_over else max(len(batches) - 1, 0) // ranks * ranks
            for batch in share_of_rank(batches[:ready], rank, ranks):
                yield [held[i] if i >= 0 else uncounted(held[~i]) for i in batch]
            held = [held[i] for batch in batches[ready:] for i in batch]


# --- Preferences ---


def prepare_answers(
    dataset: Dataset | IterableDataset,
    encoder: TextEncoder,
    args: OfflineConfig,
    limits: PreferenceLimits,
    unpaired: bool = False,
) -> AnswerDataset | ItemStream:
    """Encode preferences and cut them to length, and say what was cut.

    With `unpaired`, each pair becomes two items with a label. It is an error if none is left.
    """
    old = sorted(set(dataset.column_names or ()) & set(OLD_NAMES))
    if old:
        words = ", ".join(f"{name} is now {OLD_NAMES[name]}" for name in old)
        warnings.warn(f"Columns of the dataset: {words}.", FutureWarning, stacklevel=2)
    table = prepare_preferences(dataset, encoder, unpaired, args.dataset_num_proc)
    if isinstance(table, IterableDataset):
        unpack = partial(_unpacked, limits=limits)
        return ItemStream(table, unpack, AnswerGroup.tokens)
    return AnswerDataset(table, limits)


def _unpacked(row: dict[str, Any], limits: PreferenceLimits) -> list[AnswerGroup]:
    """The item of a row, unless an answer has no tokens, or it is to be left out."""
    found = answer_group(row, limits)
    longest = max(map(len, found.answer_ids)) + len(found.prompt_ids)
    fits = limits.drops_over is None or longest <= limits.drops_over
    return [found] if fits and all(found.answer_ids) else []


class MismatchedDataset:
    """Answers with a label, each with another example's answer behind it (see `mismatched`)."""

    def __init__(self, answers: AnswerDataset, seed: int):
        self._answers, self.rows, self.values = answers, answers.rows, answers.values
        sources, ids = answers.rows["source"][:], [own for (own,) in answers.rows["answers_ids"]]
        self.partners = mismatched(sources, ids, seed)
        lengths = answers.lengths
        self.lengths = lengths + [len(ids[i]) for i in self.partners]

    def __len__(self) -> int:
        return len(self._answers)

    def __getitem__(self, place: int) -> AnswerGroup:
        """Make an item; see `AnswerDataset`."""
        at = place if place >= 0 else ~place
        other = self._answers[int(self.partners[at])]
        return with_mismatched(self._answers[place], other, self._answers.limits)


class MismatchedStream(ItemStream):
    """The same of a stream: an item's partner is the last one before it that fits."""

    def __init__(self, items: ItemStream, limits: PreferenceLimits):
        super().__init__(items.rows, items.unpack, items.size)
        self._limits = limits

    def __iter__(self) -> Iterator[AnswerGroup]:
        recent: deque[AnswerGroup] = deque(maxlen=LOOKED_BACK)
        waiting: list[AnswerGroup] = []  # until the first one comes that fits
        for item in super().__iter__():
            yield from (
                with_mismatched(one, item, self._limits) for one in waiting if _fits(one, item)
            )
            waiting = [one for one in waiting if not _fits(one, item)]
            partner = next((one for one in reversed(recent) if _fits(item, one)), None)
            if partner is None:
                waiting.append(item)
            else:
                yield with_mismatched(item, partner, self._limits)
            recent.append(item)
        if waiting:
            raise ValueError(
                f"Row {waiting[0].source} of the stream has no partner: the KL estimate needs rows "
                "of other examples with other completions."
            )


def _fits(item: AnswerGroup, other: AnswerGroup) -> bool:
    return item.source != other.source and item.answer_ids != other.answer_ids


def with_mismatched(item: AnswerGroup, other: AnswerGroup, limits: PreferenceLimits) -> AnswerGroup:
    """Put the answer of another item behind that of an item, cut to the room that there is."""
    room: Any = None
    if limits.max_length is not None:
        room = max(limits.max_length - len(item.prompt_ids), 1)
    return dataclasses.replace(item, answer_ids=[*item.answer_ids, other.answer_ids[0][:room]])


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
        tables = {}
        for name, by_row in columns.items():
            places = range(max(by_row) + 1 if rows is None else rows)
            found = zip_longest(*(by_row.get(row, []) for row in places), fillvalue=np.nan)
            tables[name] = np.array([*found], dtype=np.float32).T
        return tables
