"""Which examples go into the micro-batches of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from datasets import IterableDataset
from torch.utils.data import IterableDataset as TorchIterableDataset
from torch.utils.data import Sampler
from transformers.utils import logging

from ...data.packing import MicroBatchSampler

logger = logging.get_logger(__name__)

PACKED_AT_ONCE = 1000  # items of a stream
BUFFERED = 10_000  # rows of a stream that is shuffled
Item = TypeVar("Item")


def share_of_rank(batches: Sequence[list[int]], rank: int, ranks: int) -> Iterator[list[int]]:
    """The micro-batches of one rank; all ranks have equally many.

    A rank that gets none in the last round has one with an item that does not count, written as
    `~item`: every rank takes part in every step.
    """
    for first in range(0, len(batches), ranks):
        mine = first + rank
        yield batches[mine] if mine < len(batches) else [~batches[first][0]]


class RankBatches(Sampler[list[int]]):
    """The micro-batches of one rank, of those that every rank makes alike."""

    def __init__(self, batches: MicroBatchSampler, rank: int, ranks: int):
        self._batches, self._rank, self._ranks = batches, rank, ranks

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose micro-batches come next."""
        self._batches.set_epoch(epoch)

    def __len__(self) -> int:
        return -(-len(self._batches) // self._ranks)

    def __iter__(self) -> Iterator[list[int]]:
        return share_of_rank(self._batches.batches(), self._rank, self._ranks)


class ItemStream(TorchIterableDataset):  # type: ignore[type-arg]
    """Prepared items of a stream of rows, which is read anew for each epoch.

    Args:
        unpack: makes the items of a row, such as documents; none, to leave it out.
        size: tokens of an item.
    """

    def __init__(
        self,
        rows: IterableDataset,
        unpack: Callable[[dict[str, Any]], Sequence[Item]],
        size: Callable[[Item], int],
    ):
        self.rows, self.size, self.unpack = rows, size, unpack
        self._has_warned = False

    def shuffle(self, seed: int) -> None:
        """Read rows in another order in each epoch, from a buffer."""
        self.rows = self.rows.shuffle(seed=seed, buffer_size=BUFFERED)

    def __iter__(self) -> Iterator[Any]:
        left_out = merged = 0
        for row in self.rows:
            items = self.unpack(row)
            left_out, merged = left_out + (not items), merged + (row.get("merged", 0) > 0)
            if not items and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    f"Row {row['source']} of the stream has nothing to train on and is left out; "
                    "so are others like it."
                )
            yield from items
        if left_out or merged:
            logger.warning(
                f"Rows of the stream with nothing to train on, left out: {left_out}; with a token "
                f"that stands for characters of both the prompt and what is trained on: {merged}."
            )


class StreamBatches(TorchIterableDataset):  # type: ignore[type-arg]
    """The micro-batches of one rank of a stream, which every rank reads.

    Args:
        items (`ItemStream`): what is trained on; an item has `uncounted()`.
        rows (`int`): items of a micro-batch, or packs of them.
        max_tokens, pack_size (`int`, *optional*): as for `MicroBatchSampler`.
        place: rank of this process, and how many there are.
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
                yield [held[i] if i >= 0 else held[~i].uncounted() for i in batch]
            held = [held[i] for batch in batches[ready:] for i in batch]
