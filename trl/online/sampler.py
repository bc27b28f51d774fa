"""The order of prompts: each repeated for its group, each round for its micro-steps."""

import math
from collections.abc import Iterable, Iterator, Sized
from itertools import islice, repeat
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
        self._size, self._repeats = len(data_source), (mini_repeat_count, batch_size, repeat_count)
        self._shuffle = shuffle
        self._seed = torch.seed() % 2**32 if seed is None else seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + 1_000_003 * self._epoch)
        drawn = torch.randperm(self._size, generator=generator).tolist()
        yield from _rounds(drawn if self._shuffle else range(self._size), *self._repeats)

    def __len__(self) -> int:
        return self._size // self._repeats[1] * math.prod(self._repeats)


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
        self._source, self._repeats = source, (mini_repeat_count, batch_size, repeat_count)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = _rounds(self._source, *self._repeats)
        if (first := next(rows, None)) is None:
            raise ValueError(
                f"The stream has fewer rows than the {self._repeats[1]} prompts that one round "
                "takes. Add rows, or lower generation_batch_size."
            )
        yield first
        yield from rows


def _rounds(rows: Iterable[Any], inner: int, size: int, outer: int) -> Iterator[Any]:
    left = iter(rows)
    while len(chosen := list(islice(left, size))) == size:
        for row in chosen * outer:
            yield from repeat(row, inner)
