"""What the tokens of a packed row may see.

Tokens of a forward lie in one row without padding: first the prefixes of all groups, then the tails
of their completions. A prefix attends to itself, causally; a tail to the prefix of its group and,
causally, to itself. In a layer with a window both look back no further than that.

No mask says so. Tails of similar length are gathered into buckets, and each further set of keys
that a bucket sees is one that kernels know: all keys, or fewer with every token, which is causal
attention read from behind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tail = tuple[slice, int, int]  # its prefix, start and stop


@dataclass(frozen=True)
class Group:
    """Places of one group in the row: its prefix, and its tails one after the other."""

    prefix: slice
    cuts: tuple[tuple[int, int], ...] = ()  # where each tail that has tokens starts and stops

    @property
    def tails(self) -> slice:
        """All of them."""
        return slice(self.cuts[0][0], self.cuts[-1][1]) if self.cuts else slice(0, 0)


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
    fading: bool = False  # the last token sees the first of them, and each before it one more

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

    def add(self, total: Tensor, grad: Tensor) -> None:
        """Add a gradient of what was gathered to (1, K, T, D)."""
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


class Places(NamedTuple):
    """Which queries of a row see which of its keys."""

    spans: tuple[Span, ...] = ()
    buckets: tuple[Bucket, ...] = ()

    def is_causal(self, length: int) -> bool:
        """Whether it is causal attention of a row of this length, which needs no places."""
        row = slice(0, length)
        return self == Places((Span(row, row, causal=True),))


def gather(packed: Tensor, index: Tensor) -> Tensor:
    """Take places (n, w) of (1, N, T, ...): (n, N, w, ...)."""
    return packed[0][:, index].transpose(0, 1)


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
    known: dict[Window | None, Places] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        groups: Sequence[tuple[int, Sequence[int]]],
        device: torch.device | str,
        kept: Layers | None = None,
    ) -> Packing:
        """Lay out groups given as (prefix length, tail lengths)."""
        places: list[Group] = []
        prefix_start, tail_start = 0, sum(prefix for prefix, _ in groups)
        for prefix, tails in groups:
            ends = list(accumulate(tails, initial=tail_start))
            cuts = tuple((start, stop) for start, stop in pairwise(ends) if start < stop)
            places.append(Group(slice(prefix_start, prefix_start + prefix), cuts))
            prefix_start, tail_start = prefix_start + prefix, ends[-1]
        return cls(tuple(places), device, kept)

    @classmethod
    def of_tails(
        cls, tails: Sequence[Tail], kept: Layers, device: torch.device
    ) -> tuple[slice, Packing]:
        """Lay out neighboring tails alone, and say where they were."""
        first, last = tails[0][1], tails[-1][2]
        groups: list[Group] = []
        for prefix, parts in groupby(tails, key=itemgetter(0)):
            cuts = tuple((start - first, stop - first) for _, start, stop in parts)
            behind = slice(prefix.start + last - first, prefix.stop + last - first)
            groups.append(Group(behind, cuts))
        return slice(first, last), cls(tuple(groups), device, kept, tails_alone=True)

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

    def places(self, window: Window | None = None) -> Places:
        """What a layer sees that has this window: all of it in buckets, if the window matters."""
        if window is not None and self.longest <= window.size:
            window = None
        if window not in self.known:
            alike = defaultdict[_Kind, list[_Block]](list)
            for kind, block in self._blocks(window):
                alike[kind].append(block)
            buckets = [_bucket(blocks, self.device, window) for blocks in alike.values()]
            spans = self._spans() if window is None else ()
            self.known[window] = Places(tuple(spans), tuple(buckets))
        return self.known[window]

    def _spans(self) -> Iterator[Span]:
        """Prefixes, which see themselves, and all tails of a group, which see its prefix."""
        for group in self.groups:
            if group.prefix.start == group.prefix.stop:
                continue
            if not self.tails_alone:
                yield Span(group.prefix, group.prefix, causal=True)
            if group.cuts:
                yield Span(group.tails, group.prefix)

    def _blocks(self, window: Window | None) -> Iterator[tuple[_Kind, _Block]]:
        """Tails, or with a window pieces of all rows; those of a kind may be in one bucket."""
        for number, at, before, own, end in self._rows(bool(window) and not self.tails_alone):
            for start, stop in window.blocks(before, end) if window else [(before, end)]:
                # Only what begins right behind one prefix sees the same keys of it.
                shared = number if start == before else -1
                kind = (stop - start).bit_length(), window and (window.reach(start), shared)
                yield kind, (start, stop - start, before, at, own)


# A length between two powers of two, and in a window how much stands before it, and of what.
_Kind = tuple[int, tuple[int, int] | None]
# First position, tokens, positions of the prefix; where in the row the prefix and the rest begin.
_Block = tuple[int, int, int, int, int]


def _bucket(blocks: Sequence[_Block], device: torch.device | str, window: Window | None) -> Bucket:
    """Blocks of similar length that have as much before them."""
    first, count, before, prefix, own = torch.tensor(blocks).t()[..., None]
    width = int(count.max())
    offsets = torch.arange(width)
    exists = offsets < count

    def places(start: Tensor, length: int) -> Tensor:
        at = start + torch.arange(length)
        return torch.where(at < before, prefix + at, own + at - before)

    # Made here and read on the device alone, so the host need not wait for the copies.
    def move(values: Tensor) -> Tensor:
        return values.to(device, non_blocking=True)

    # Repeats stand behind a tail, where causality hides them.
    index = own + first - before + torch.minimum(offsets, count - 1)
    sights = [Sight(move(index), causal=True)]
    if window is not None:
        reach, lost = window.reach(blocks[0][0]), window.lost(blocks[0][0], width)
        everything = places(first - reach + lost, reach - lost)
        if (everything == everything[:1]).all():
            everything = everything[:1]
        if lost:
            before_all = places(first - reach, lost).flip(1)
            sights.append(Sight(move(before_all), causal=True, fading=True))
        if reach > lost:
            sights.append(Sight(move(everything)))
    cells = exists.flatten().nonzero()[:, 0]
    seen, starts = tuple(sights), tuple(index[:, 0].tolist())
    return Bucket(sights[0].index, move(exists), move(cells), move(index[exists]), seen, starts)
