"""The order of prompts: each is repeated for its group, each round for its micro-steps."""

from collections.abc import Iterable, Iterator, Sized
from itertools import islice, repeat
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler


class RepeatSampler(Sampler[int]):
    """Yields dataset indices in rounds of whole groups.

    The indices are cut into rounds of `batch_size` prompts. Each index is yielded
    `mini_repeat_count` times in a row, once per completion, and each round `repeat_count` times,
    once per micro-step. Prompts that do not fill a round are dropped. With `shuffle`, each epoch
    has its own order, which depends on `seed` alone.
    """

    def __init__(
        self,
        data_source: Sized,
        mini_repeat_count: int,
        batch_size: int = 1,
        repeat_count: int = 1,
        shuffle: bool = True,
        seed: int | None = None,
    ):
        self._num_rows = len(data_source)
        self._mini_repeat_count = mini_repeat_count
        self._batch_size = batch_size
        self._repeat_count = repeat_count
        self._shuffle = shuffle
        self._seed = torch.seed() % 2**32 if seed is None else seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch in the next iteration."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + 1_000_003 * self._epoch)
        order = range(self._num_rows)
        if self._shuffle:
            order = torch.randperm(self._num_rows, generator=generator).tolist()
        yield from _rounds(order, self._mini_repeat_count, self._batch_size, self._repeat_count)

    def __len__(self) -> int:
        num_rounds = self._num_rows // self._batch_size
        return num_rounds * self._batch_size * self._mini_repeat_count * self._repeat_count


class RepeatIterableDataset(IterableDataset):
    """The rows of a stream in the order of `RepeatSampler`; shuffling is left to the stream.

    Reading it raises a ValueError if it has fewer than `batch_size` rows.
    """

    def __init__(
        self,
        source: Iterable[dict[str, Any]],
        mini_repeat_count: int,
        batch_size: int = 1,
        repeat_count: int = 1,
    ):
        self._source = source
        self._mini_repeat_count = mini_repeat_count
        self._batch_size = batch_size
        self._repeat_count = repeat_count

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = _rounds(self._source, self._mini_repeat_count, self._batch_size, self._repeat_count)
        first = next(rows, None)
        if first is None:
            raise ValueError(
                f"The stream has fewer rows than the {self._batch_size} prompts that one round "
                "takes. Add rows, or lower generation_batch_size."
            )
        yield first
        yield from rows


def _rounds(
    rows: Iterable[Any], mini_repeat_count: int, batch_size: int, repeat_count: int
) -> Iterator[Any]:
    """Yield whole rounds of `batch_size` rows in the order of `RepeatSampler`."""
    remaining = iter(rows)
    while len(batch := list(islice(remaining, batch_size))) == batch_size:
        for row in batch * repeat_count:
            yield from repeat(row, mini_repeat_count)
