"""What the tokens of a packed row may see.

Tokens of a forward lie in one row without padding: first the prefixes of all groups, then the tails
of their completions. A prefix attends to itself, causally; a tail to the prefix of its group and,
causally, to itself. In a layer with a window both look back no further than that.

No mask says so. Tails of similar length are gathered into buckets, and each further set of keys
that a bucket sees is one that kernels know: all keys, or fewer with every token, which is causal
attention read from behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor

Tail = tuple[slice, int, int]  # its prefix, start and stop


@dataclass(frozen=True)
class Group:
    """Places of one group in the row: its prefix, and its tails one after the other."""

    prefix: slice
    tails: slice
    cuts: tuple[tuple[int, int], ...] = ()  # where each tail that has tokens starts and stops


@dataclass(frozen=True)
class Window:
    """How far a layer looks back: `size` tokens, or to the last position that is a multiple of it.

    A token is one of its own `size`.
    """

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
            raise NotImplementedError("chunked attention is not decoded behind one prefix")
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
class Sight:
    """Keys that the tokens of a bucket see."""

    index: Tensor  # (n, s) places; (1, s): the same for all rows of the bucket
    causal: bool = False  # token i sees the first i + 1 of them
    fading: bool = False  # token i sees all but the first i of them

    def turn(self, tokens: Tensor) -> Tensor:
        """Bring what belongs to tokens (n, N, w, ...) to the shape in which a kernel looks."""
        if self.fading:
            return tokens.flip(2)
        if len(self.index) == len(tokens):
            return tokens
        return tokens.transpose(0, 1).flatten(1, 2)[None]

    def turn_back(self, found: Tensor, rows: int) -> Tensor:
        """Undo `turn` for n rows."""
        if self.fading:
            return found.flip(2)
        if len(self.index) == rows:
            return found
        return found[0].unflatten(1, (rows, -1)).transpose(0, 1)

    def gather(self, packed: Tensor) -> Tensor:
        """Take the keys or values from (1, K, T, D)."""
        found = packed[0][:, self.index].transpose(0, 1)
        return found.flip(2) if self.fading else found

    def add(self, total: Tensor, grad: Tensor) -> None:
        """Add a gradient of what was gathered to (1, K, T, D)."""
        grad = grad.flip(2) if self.fading else grad
        total[0].index_add_(1, self.index.flatten(), grad.transpose(0, 1).flatten(1, 2))


@dataclass(frozen=True)
class Bucket:
    """Tails of similar length; a boolean index would make the host wait, in every layer."""

    index: Tensor  # (n, w) places in the row; a shorter tail repeats its last one
    exists: Tensor  # (n, w) bool: False at the repeats
    cells: Tensor  # (e,) places in the flattened (n, w), repeats left out
    places: Tensor  # (e,) their places in the row, each once
    sights: tuple[Sight, ...]  # of themselves first
    starts: tuple[int, ...]  # the first places, as the host knows them

    def gather(self, packed: Tensor) -> Tensor:
        """Take the places of (1, N, T, ...): (n, N, w, ...)."""
        return packed[0][:, self.index].transpose(0, 1)

    def tokens(self, values: Tensor) -> Tensor:
        """Drop the repeats of (n, N, w, ...): (N, e, ...)."""
        return values.transpose(0, 1).flatten(1, 2).index_select(1, self.cells)


@dataclass(frozen=True)
class Span:
    """Neighboring queries of a row, and keys that all of them see."""

    queries: slice
    keys: slice
    causal: bool = False  # queries and keys are the same tokens
    again: bool = False  # a span before this has the same queries


@dataclass(frozen=True)
class Packing:
    """Where the groups of a packed forward are.

    `buckets` hold the tails of similar length. Repeats stand behind a tail, where causality hides
    them. Keys and values of every layer are put into `kept`, if there is one; those of the prefixes
    stand behind a row of tails alone.
    """

    groups: tuple[Group, ...]
    buckets: tuple[Bucket, ...]
    kept: Layers | None = None
    tails_alone: bool = False
    windowed: dict[Window, Packing] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, groups: Sequence[tuple[int, Sequence[int]]], device: torch.device | str) -> Packing:
        """Lay out groups given as (prefix length, tail lengths)."""
        places: list[Group] = []
        prefix_start, tail_start = 0, sum(prefix for prefix, _ in groups)
        for prefix, tails in groups:
            ends = list(accumulate(tails, initial=tail_start))
            at = slice(prefix_start, prefix_start + prefix)
            cuts = tuple((start, stop) for start, stop in pairwise(ends) if start < stop)
            places.append(Group(at, slice(tail_start, ends[-1]), cuts))
            prefix_start, tail_start = prefix_start + prefix, ends[-1]
        every = (cut for group in places for cut in group.cuts)
        return cls(tuple(places), make_buckets(every, device))

    @classmethod
    def of_tails(
        cls, tails: Sequence[Tail], kept: Layers, device: torch.device
    ) -> tuple[slice, Packing]:
        """Lay out neighboring tails alone, and say where they were."""
        first, last = tails[0][1], tails[-1][2]
        groups: list[Group] = []
        for prefix, parts in groupby(tails, key=lambda tail: tail[0]):
            cuts = tuple((start - first, stop - first) for _, start, stop in parts)
            behind = slice(prefix.start + last - first, prefix.stop + last - first)
            groups.append(Group(behind, slice(cuts[0][0], cuts[-1][1]), cuts))
        buckets = make_buckets((cut for group in groups for cut in group.cuts), device)
        return slice(first, last), cls(tuple(groups), buckets, kept, tails_alone=True)

    @property
    def spans(self) -> Iterator[Span]:
        """Prefixes, which see themselves, and all tails of a group, which see its prefix."""
        for group in self.groups:
            if group.prefix.start == group.prefix.stop:
                continue
            if not self.tails_alone:
                yield Span(group.prefix, group.prefix, causal=True)
            if group.tails.stop > group.tails.start:
                yield Span(group.tails, group.prefix)

    @property
    def is_one_prefix(self) -> bool:
        """Whether it is plain causal attention, which needs no places."""
        return len(self.groups) == 1 and not self.buckets

    @property
    def longest(self) -> int:
        """Tokens of the longest prefix with a tail."""
        rows = (
            group.prefix.stop - group.prefix.start + stop - start
            for group in self.groups
            for start, stop in ((0, 0), *group.cuts)
        )
        return max(rows, default=0)

    def within(self, window: Window | None, device: torch.device) -> Packing:
        """What a layer sees that has this window: all of it in buckets, if the window matters."""
        if window is None or self.longest <= window.size:
            return self
        if window not in self.windowed:
            self.windowed[window] = Packing((), tuple(self._buckets(window, device)))
        return self.windowed[window]

    def _buckets(self, window: Window, device: torch.device) -> Iterator[Bucket]:
        alike: dict[tuple[int, int, int], list[_Block]] = {}
        for number, group in enumerate(self.groups):
            at, prefix = group.prefix.start, group.prefix.stop - group.prefix.start
            rows = [] if self.tails_alone else [(0, at, prefix)]
            rows += [(prefix, start, prefix + stop - start) for start, stop in group.cuts]
            for before, own, end in rows:
                for start, stop in window.blocks(before, end):
                    # Only what begins right behind one prefix sees the same keys of it.
                    shared = number if start == before else -1
                    kind = (stop - start).bit_length(), window.reach(start), shared
                    alike.setdefault(kind, []).append((start, stop - start, before, at, own))
        for (width, _, _), blocks in alike.items():
            if width:
                yield _bucket(blocks, device, window)


# First position, tokens, positions of the prefix; where in the row the prefix and the rest begin.
_Block = tuple[int, int, int, int, int]


def make_buckets(cuts: Iterable[tuple[int, int]], device: torch.device | str) -> tuple[Bucket, ...]:
    """Put tails (start, stop) together whose lengths lie between two powers of two."""
    by_size: dict[int, list[_Block]] = {}
    for start, stop in cuts:
        by_size.setdefault((stop - start).bit_length(), []).append((0, stop - start, 0, 0, start))
    return tuple(_bucket(blocks, device) for blocks in by_size.values())


def _bucket(
    blocks: Sequence[_Block], device: torch.device | str, window: Window | None = None
) -> Bucket:
    """Blocks of similar length that have as much before them."""
    first, count, before, prefix, own = torch.tensor(blocks).t()[..., None]

    def places(start: Tensor, length: int) -> Tensor:
        at = start + torch.arange(length)
        return torch.where(at < before, prefix + at, own + at - before)

    # Made here and read on the device alone, so the host need not wait for the copies.
    def move(values: Tensor) -> Tensor:
        return values.to(device, non_blocking=True)

    width = int(count.max())
    offsets = torch.arange(width)
    exists = offsets < count
    index = own + first - before + torch.minimum(offsets, count - 1)
    sights = [Sight(move(index), causal=True)]
    if window is not None:
        reach, lost = window.reach(blocks[0][0]), window.lost(blocks[0][0], width)
        everything = places(first - reach + lost, reach - lost)
        if (everything == everything[:1]).all():
            everything = everything[:1]
        if lost:
            sights.append(Sight(move(places(first - reach, lost)), causal=True, fading=True))
        if reach > lost:
            sights.append(Sight(move(everything)))
    cells = exists.flatten().nonzero()[:, 0]
    seen, starts = tuple(sights), tuple(index[:, 0].tolist())
    return Bucket(sights[0].index, move(exists), move(cells), move(index[exists]), seen, starts)
