"""The order of prompts: each repeated for its group, each round for its micro-steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler


class RepeatSampler(Sampler[int]):
    """Yields dataset indices in rounds of whole groups.

    The indices are cut into rounds of `batch_size` prompts; each index stands `mini_repeat_count`
    times in a row, once for a completion, and each round `repeat_count` times, once for a
    micro-step. Prompts that do not fill a round are dropped. Shuffled, each epoch has its own
    order, which follows from `seed` alone.
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
        self._size, self._rounds = len(data_source), len(data_source) // batch_size
        self._mini_repeat_count = mini_repeat_count
        self._batch_size = batch_size
        self._repeat_count = repeat_count
        self._shuffle = shuffle
        self._seed = torch.seed() % 2**32 if seed is None else seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + 1_000_003 * self._epoch)
        drawn = torch.randperm(self._size, generator=generator).tolist()
        order = drawn if self._shuffle else range(self._size)
        for start in range(0, self._rounds * self._batch_size, self._batch_size):
            chosen = order[start : start + self._batch_size]
            yield from _repeated(chosen, self._mini_repeat_count, self._repeat_count)

    def __len__(self) -> int:
        rows = self._batch_size * self._mini_repeat_count * self._repeat_count
        return self._rounds * rows


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
        """Tell the stream which epoch's order comes next, if it wants to know."""
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = iter(self._source)
        chosen = list(islice(rows, self._batch_size))
        if len(chosen) < self._batch_size:
            raise ValueError(
                f"The stream has {len(chosen)} rows, but one round takes {self._batch_size} "
                "prompts. Add rows, or lower generation_batch_size."
            )
        while len(chosen) == self._batch_size:
            yield from _repeated(chosen, self._mini_repeat_count, self._repeat_count)
            chosen = list(islice(rows, self._batch_size))


def _repeated(items: Sequence[Any], inner: int, outer: int) -> Iterator[Any]:
    return chain.from_iterable(repeat(item, inner) for _ in range(outer) for item in items)
