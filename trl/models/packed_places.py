"""What the tokens of a packed row may see.

Tokens of a forward lie in one row without padding: first the prefixes of all groups, then the tails
of their completions. A prefix attends to itself, causally; a tail to the prefix of its group and,
causally, to itself. In a layer with a window both look back no further than that.

No mask says so. Tails of similar length are gathered and computed together, and each further set of
keys that they see is one that kernels know: all keys, or fewer with every token, which is causal
attention read from behind.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby, pairwise, repeat
from operator import itemgetter
from typing import Any, Self

import torch
from torch import Tensor

Tail = tuple[slice, int, int]  # its prefix, start and stop


@dataclass(frozen=True)
class Group:
    """Places of one group in the row: its prefix, and its tails one after the other."""

    prefix: slice
    cuts: tuple[tuple[int, int], ...] = ()  # where each tail that has tokens starts and stops
    unread: int = 0  # tokens the prefix begins with whose last hidden states nothing reads

    @property
    def tails(self) -> slice:
        return slice(self.cuts[0][0], self.cuts[-1][1]) if self.cuts else slice(0, 0)


@dataclass(frozen=True)
class Window:
    """How far a layer looks back: `size` tokens, itself one, or to the last multiple of `size`."""

    size: int
    is_chunked: bool = False

    @property
    def _step(self) -> int:
        # So that of a block of tokens none sees less of it than itself.
        return self.size if self.is_chunked else self.size - 1

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Cut positions where what lies before the tokens of a block can be said for all of it."""
        near = self.is_chunked or start < self._step
        first = (start // self._step + 1) * self._step if near else start + self._step
        return pairwise([start, *range(first, stop, self._step), stop])

    def reach(self, start: int) -> int:
        """How many tokens before `start` the token there sees."""
        return start % self.size if self.is_chunked else min(start, self._step)

    def first(self, prefix: int, own: int) -> int:
        """The first of the last tokens of a prefix that the last of `own` new tokens sees."""
        if self.is_chunked and prefix + own > self.size:
            raise NotImplementedError("chunked attention cannot decode behind a shared prefix")
        return max(0, prefix - max(0, self.size - own))

    def lost(self, start: int, width: int) -> int:
        """How many of those `width` tokens from `start` on lose, one with each token."""
        return width if not self.is_chunked and start >= self._step else 0


States = dict[tuple[str, int, int], Tensor]  # by what it is, layer and number


class Layers(dict[int, tuple[Tensor, Tensor]]):
    """Keys and values (1, K, T, D) by index of the layer, and the windows of layers."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # each is itself alone

    def __init__(self) -> None:
        super().__init__()
        self.windows: dict[int, Window | None] = {}
        self.states: dict[tuple[int, int], States] = {}  # by layer and start of the prefix
        self._is_closed = False

    def setdefault(self, layer: int, own: Any = None) -> Any:
        """Keep those of a layer, unless activations are recomputed after all was read."""
        return own if self._is_closed else super().setdefault(layer, own)

    def close(self) -> None:
        """Let go of all, for good."""
        self._is_closed = True
        self.clear()
        self.states.clear()


@dataclass(frozen=True)
class Part:
    """Queries of a row, and keys that they see."""

    queries: Any  # a slice, or a tensor (n, w) of places
    keys: Any  # a slice, or a tensor (n, s) of places
    causal: bool = False  # query i sees the first i + 1 of the keys
    again: bool = False  # a part before this may have had the same queries
    # Where queries are places of rows that repeat their last one, which are none of those repeats;
    # a boolean index would make the host wait, in every layer.
    exists: Any = None  # (n, w) bool
    cells: Any = None  # (e,) where they are in the flattened (n, w)
    places: Any = None  # (e,) their places, each once
    prefixes: tuple[int, ...] = ()  # where prefixes of rows begin, -1 without, as the host knows it

    def put(self, row: Tensor, found: Tensor) -> None:
        """Write what belongs to the queries (n, N, w, ...) to their places in (1, N, T, ...)."""
        if self.places is None:
            row[:, :, self.queries] = found
        else:
            flat = found.transpose(0, 1).flatten(1, 2).index_select(1, self.cells)
            row[0].index_copy_(1, self.places, flat.to(row.dtype))


Parts = tuple[Part, ...]


def take(row: Tensor, at: slice | Tensor) -> Tensor:
    """What stands at places (n, w) of (1, N, T, ...): (n, N, w, ...)."""
    return row[:, :, at] if isinstance(at, slice) else row[0][:, at].transpose(0, 1)


def add(row: Tensor, at: slice | Tensor, values: Tensor) -> None:
    """Add values (n, N, w, ...) to places (n, w) of (1, N, T, ...)."""
    if isinstance(at, slice):
        row[:, :, at] += values
    else:
        row[0].index_add_(1, at.flatten(), values.transpose(0, 1).flatten(1, 2))


# A length between two powers of two, and in a window how much stands before it, and of what.
_Kind = tuple[int, tuple[int, int] | None]
# First position, tokens, positions of the prefix; where in the row the prefix and the rest begin.
_Block = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Packing:
    """Where the groups of a packed forward are.

    Keys and values of every layer are put into `kept`, if there is one; those of the prefixes stand
    behind a row of tails alone.
    """

    groups: tuple[Group, ...]
    device: torch.device | str  # where the forward is computed
    kept: Layers | None = None
    tails_alone: bool = False
    known: dict[Window | None, Parts] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        groups: Sequence[tuple[int, Sequence[int]]],
        device: torch.device | str,
        kept: Layers | None = None,
        unread: Sequence[int] | None = None,
    ) -> Self:
        """Lay out groups given as (prefix length, tail lengths), perhaps with tokens unread."""
        places: list[Group] = []
        prefix_start, tail_start = 0, sum(prefix for prefix, *_ in groups)
        for (prefix, tails), skipped in zip(groups, unread or repeat(0), strict=False):
            ends = list(accumulate(tails, initial=tail_start))
            cuts = tuple((start, stop) for start, stop in pairwise(ends) if start < stop)
            places.append(Group(slice(prefix_start, prefix_start + prefix), cuts, skipped))
            prefix_start, tail_start = prefix_start + prefix, ends[-1]
        return cls(tuple(places), device, kept)

    @classmethod
    def of_tails(
        cls, tails: Sequence[Tail], kept: Layers, device: torch.device
    ) -> tuple[slice, Self]:
        """Lay out neighboring tails alone, and say where they were."""
        first, last = tails[0][1], tails[-1][2]
        groups: list[Group] = []
        for prefix, parts in groupby(tails, key=itemgetter(0)):
            cuts = tuple((start - first, stop - first) for _, start, stop in parts)
            behind = slice(prefix.start + last - first, prefix.stop + last - first)
            groups.append(Group(behind, cuts))
        return slice(first, last), cls(tuple(groups), device, kept, tails_alone=True)

    @cached_property
    def read(self) -> Tensor | None:
        """Places (n,) whose last hidden states are read; None if all are."""
        if not any(group.unread for group in self.groups):
            return None
        runs = [(group.prefix.start + group.unread, group.prefix.stop) for group in self.groups]
        runs += [cut for group in self.groups for cut in group.cuts]
        return torch.cat([torch.arange(*run) for run in runs]).to(self.device, non_blocking=True)

    @property
    def with_prefix(self) -> list[Group]:
        return [group for group in self.groups if group.prefix.start < group.prefix.stop]

    @property
    def longest(self) -> int:
        """Tokens of the longest prefix with a tail."""
        return max((end for *_, end in self._rows(True)), default=0)

    def _rows(self, with_prefixes: bool) -> Iterator[tuple[int, int, int, int, int]]:
        """Group, start of its prefix, positions before a row, where it begins, and positions."""
        for number, group in enumerate(self.groups):
            at, prefix = group.prefix.start, group.prefix.stop - group.prefix.start
            if prefix and with_prefixes:
                yield number, at, 0, at, prefix
            for start, stop in group.cuts:
                yield number, at, prefix, start, prefix + stop - start

    def parts(self, window: Window | None = None) -> Parts:
        """What a layer sees that has this window: no slices of the row if the window matters."""
        if window is not None and self.longest <= window.size:
            window = None
        if window not in self.known:
            alike = defaultdict[_Kind, list[_Block]](list)
            for kind, block in self._blocks(window):
                alike[kind].append(block)
            found = list(self._slices()) if window is None else []
            for blocks in alike.values():
                found += _gathered(blocks, self.device, window)
            self.known[window] = tuple(found)
        return self.known[window]

    def _slices(self) -> Iterator[Part]:
        """Prefixes, which see themselves, and all tails of a group, which see its prefix."""
        for group in self.with_prefix:
            if not self.tails_alone:
                yield Part(group.prefix, group.prefix, causal=True)
            if group.cuts:
                yield Part(group.tails, group.prefix)

    def _blocks(self, window: Window | None) -> Iterator[tuple[_Kind, _Block]]:
        """Tails, or with a window pieces of all rows; those of a kind are computed together."""
        for number, at, before, own, end in self._rows(bool(window) and not self.tails_alone):
            for start, stop in window.blocks(before, end) if window else [(before, end)]:
                # Only what begins right behind one prefix sees the same keys of it.
                shared = number if start == before else -1
                kind = (stop - start).bit_length(), window and (window.reach(start), shared)
                yield kind, (start, stop - start, before, at, own)


def _gathered(
    blocks: Sequence[_Block], device: torch.device | str, window: Window | None
) -> Iterator[Part]:
    """What blocks of similar length see that have as much before them: themselves first."""
    first, count, before, prefix, own = torch.tensor(blocks).t()[..., None]
    width = int(count.max())
    offsets = torch.arange(width)
    exists = offsets < count
    # Repeats stand behind a tail, where causality hides them.
    index = own + first - before + torch.minimum(offsets, count - 1)
    prefixes = tuple(torch.where(before > 0, prefix, -1)[:, 0].tolist())

    def keys(start: Tensor, length: int) -> Tensor:
        at = start + torch.arange(length)
        return torch.where(at < before, prefix + at, own + at - before)

    # Made here and read on the device alone, so the host need not wait for the copies.
    def part(queries: Tensor, keys: Tensor, exists: Tensor, causal: bool, again: bool) -> Part:
        tensors = queries, keys, exists, exists.flatten().nonzero()[:, 0], queries[exists]
        queries, keys, exists, cells, places = (x.to(device, non_blocking=True) for x in tensors)
        return Part(queries, keys, causal, again, exists, cells, places, prefixes)

    yield part(index, index, exists, causal=True, again=window is None)
    if window is None:
        return
    reach, lost = window.reach(blocks[0][0]), window.lost(blocks[0][0], width)
    if lost:
        fading = keys(first - reach, lost).flip(1)
        yield part(index.flip(1), fading, exists.flip(1), causal=True, again=True)
    if reach > lost:
        everything = keys(first - reach + lost, reach - lost)
        if (everything == everything[:1]).all():  # they are queries of one attention
            index, everything = index[exists][None], everything[:1]
            exists = torch.ones_like(index, dtype=torch.bool)
        yield part(index, everything, exists, causal=False, again=True)
