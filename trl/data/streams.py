"""Prepared rows of streams, and their micro-batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from datasets import Dataset, IterableDataset
from torch.utils.data import IterableDataset as TorchIterableDataset

from .cutting import Cut, CutCounter
from .examples import Example, num_tokens
from .packing import MicroBatchSampler, share_of_rank

PACKED_AT_ONCE = 1000  # rows of a stream
READ_AT_ONCE = 100  # by users


@dataclass(eq=False)
class PreparedStream(TorchIterableDataset):  # type: ignore[type-arg]
    """A stream of examples with the columns of a prepared dataset, encoded and cut as it is read.

    `rows` are encoded in full length, `cut` cuts some of them, and `arrange` may change the order
    of examples, or add a column.
    """

    rows: IterableDataset
    cut: Callable[[Dataset], Cut]
    arrange: Callable[[Iterator[Example]], Iterator[Example]] = iter

    def __post_init__(self) -> None:
        # Made once: a stream that is derived from another one does not learn of its epochs.
        self._tables = self.rows.with_format("arrow")

    def shuffled(self, seed: int, buffer_size: int) -> "PreparedStream":
        """Return the stream in an order that depends on the epoch, mixed within a buffer."""
        return replace(self, rows=self.rows.shuffle(seed=seed, buffer_size=buffer_size))

    @property
    def column_names(self) -> list[str]:
        """The columns that examples have."""
        return [*next(iter(self))]

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of a stream that is shuffled."""
        self._tables.set_epoch(epoch)

    def __iter__(self) -> Iterator[Example]:
        return self.examples(READ_AT_ONCE)

    def examples(self, at_once: int) -> Iterator[Example]:
        """Read the stream from its beginning, so many rows at a time."""
        return self.arrange(self._cut_rows(at_once))

    def _cut_rows(self, at_once: int) -> Iterator[Example]:
        losses = CutCounter()
        for table in self._tables.iter(at_once):
            # A fingerprint of its contents would take longer than all else.
            cut = self.cut(Dataset(table, fingerprint=""))
            losses.add(cut.report)
            yield from cut.examples()
        losses.log_totals()


@dataclass(eq=False)
class MicroBatchStream(TorchIterableDataset):  # type: ignore[type-arg]
    """Micro-batches of one rank, of a stream that every rank reads in each epoch.

    A micro-batch has so many rows, documents or packs of them; `limits` and `place` are as for
    `MicroBatchSampler`.
    """

    stream: PreparedStream
    limits: tuple[int, int | None, int | None] = (1, None, None)  # rows, tokens, those of a pack
    place: tuple[int, int] = (0, 1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of a stream that is shuffled."""
        self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Example]]:
        rank, ranks = self.place
        # Packs fit the better, the more documents there are to choose from.
        at_once = 2 * self.limits[0] * ranks if self.limits[2] is None else PACKED_AT_ONCE
        examples = self.stream.examples(at_once)
        waiting: list[Example] = []
        is_over = False
        while not is_over:
            new = list(islice(examples, at_once))
            is_over = len(new) < at_once
            waiting = waiting + new
            batches = MicroBatchSampler(list(map(num_tokens, waiting)), *self.limits).batches()
            # The last micro-batch may still grow.
            ready = len(batches) if is_over else max(len(batches) - 1, 0) // ranks * ranks
            for batch in share_of_rank(batches[:ready], rank, ranks):
                yield [_numbered(waiting, number) for number in batch]
            waiting = [waiting[number] for batch in batches[ready:] for number in batch]


def _numbered(examples: list[Example], number: int) -> Example:
    """Return an example; `~number` gives a filler (see `share_of_rank`)."""
    if number >= 0:
        return examples[number]
    return Example(**{**examples[~number], "is_filler": True})
