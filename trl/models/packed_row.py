"""A packed row: where its groups are, and which tokens attend to which.

All tokens of a forward lie in one row without padding: first the prefixes of all groups, then the
tails of their completions. A prefix attends to itself, causally. A tail attends to the prefix of
its group and, causally, to itself. In a layer with an attention window, neither looks back further
than the window.

No mask is built. Tails of similar length are gathered and computed together. Each set of keys that
they see is one that kernels support: all keys, or one key more for every query (causal attention),
or one key less for every query (causal attention in reverse order).

An "index" is a token's index in the row. A "position" is its position in its own sequence.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby, pairwise, repeat
from operator import itemgetter
from typing import NamedTuple, Self, TypeAlias

import torch
from torch import Tensor


class Tail(NamedTuple):
    """Where a tail and its prefix are in a row."""

    prefix: slice
    start: int
    stop: int


@dataclass(frozen=True)
class Group:
    """Where one group is in the row: its prefix, and its tails one after the other."""

    prefix: slice
    tails: tuple[tuple[int, int], ...] = ()  # (start, stop) of each tail that has tokens
    unread: int = 0  # leading tokens of the prefix whose last hidden states nothing reads

    @property
    def all_tails(self) -> slice:
        """The tails as one slice of the row."""
        return slice(self.tails[0][0], self.tails[-1][1]) if self.tails else slice(0, 0)


@dataclass(frozen=True)
class Window:
    """The attention window of a layer.

    A sliding window covers the last `size` tokens, including the query's own. A chunked one reaches
    back to the last multiple of `size`.
    """

    size: int
    is_chunked: bool = False

    @property
    def _step(self) -> int:
        # In blocks of this many tokens, each token sees all tokens of the block up to its own.
        return self.size if self.is_chunked else self.size - 1

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Divide positions into blocks whose tokens see the tokens before the block in one way."""
        is_first = self.is_chunked or start < self._step
        first = (start // self._step + 1) * self._step if is_first else start + self._step
        return pairwise([start, *range(first, stop, self._step), stop])

    def reach(self, start: int) -> int:
        """Return how many tokens before position `start` the token at `start` sees."""
        return start % self.size if self.is_chunked else min(start, self._step)

    def first_visible(self, prefix: int, new_tokens: int) -> int:
        """Return which of `prefix` cached tokens is the first that the last new token sees."""
        if self.is_chunked and prefix + new_tokens > self.size:
            raise NotImplementedError("chunked attention cannot decode behind a shared prefix")
        return max(0, prefix - max(0, self.size - new_tokens))

    def num_lost(self, start: int, width: int) -> int:
        """Return how many of the reached tokens drop out, one per token, in a block of `width`."""
        return width if not self.is_chunked and start >= self._step else 0


# States of recurrent layers, by (kind of state, layer, number).
States = dict[tuple[str, int, int], Tensor]
KeysValues = tuple[Tensor, Tensor]


class PrefixCache(dict[int, KeysValues]):
    """What layers computed for the row: keys and values (1, K, T, D) by index of the layer.

    Also the windows of these layers, and the states of recurrent ones.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]  # by identity

    def __init__(self) -> None:
        super().__init__()
        self.windows: dict[int, Window | None] = {}
        self.states: dict[tuple[int, int], States] = {}  # by (layer, start of the prefix)
        self._is_closed = False

    def keep(self, layer: int, keys_values: KeysValues) -> KeysValues:
        """Store what a layer computed first, and return what is stored.

        Once the cache is closed, nothing is stored: activations are being recomputed.
        """
        return keys_values if self._is_closed else self.setdefault(layer, keys_values)

    def close(self) -> None:
        """Free everything, and store nothing from now on."""
        self._is_closed = True
        self.clear()
        self.states.clear()


# A slice of the row, or a tensor (n, w) of indices.
Selection: TypeAlias = "slice | Tensor"


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention kernel: queries of a row, and the keys that they see."""

    queries: Selection
    keys: Selection
    causal: bool = False  # query i sees the first i + 1 of the keys
    accumulates: bool = False  # an earlier call may have had the same queries: merge the results
    # Only where queries are a tensor of indices: its rows are padded by repeating their last index,
    # and these say which entries are no repeats. They are all made beforehand because a boolean
    # index would make the host wait in every layer.
    is_real: Tensor | None = None  # (n, w) bool
    real_entries: Tensor | None = None  # (e,) indices into the flattened (n, w)
    real_indices: Tensor | None = None  # (e,) indices into the row
    prefix_starts: tuple[int, ...] = ()  # n: where the prefix of each begins; -1: it has none

    def write(self, row: Tensor, values: Tensor) -> None:
        """Write values (n, N, w, ...) of the queries to their indices in `row` (1, N, T, ...)."""
        if self.real_indices is None:
            row[:, :, self.queries] = values
        else:
            flat = values.transpose(0, 1).flatten(1, 2).index_select(1, self.real_entries)
            row[0].index_copy_(1, self.real_indices, flat.to(row.dtype))


AttentionCalls = tuple[AttentionCall, ...]


def read_tokens(row: Tensor, selection: Selection) -> Tensor:
    """Read the selected tokens (n, w) of a row (1, N, T, ...): (n, N, w, ...)."""
    if isinstance(selection, slice):
        return row[:, :, selection]
    return row[0][:, selection].transpose(0, 1)


def add_to_tokens(row: Tensor, selection: Selection, values: Tensor) -> None:
    """Add values (n, N, w, ...) to the selected tokens (n, w) of a row (1, N, T, ...)."""
    if isinstance(selection, slice):
        row[:, :, selection] += values
    else:
        row[0].index_add_(1, selection.flatten(), values.transpose(0, 1).flatten(1, 2))


class _Sequence(NamedTuple):
    """A prefix, or a tail behind its prefix."""

    group: int
    prefix_start: int  # index
    first: int  # position of its first token; for tails, the length of the prefix
    start: int  # index of its first token
    end: int  # position behind its last token


class _Block(NamedTuple):
    """Consecutive tokens of a sequence, which see the tokens before them in one way."""

    first: int  # position of the first token
    num_tokens: int
    prefix: int  # tokens of the prefix
    prefix_start: int  # index
    start: int  # index of the first token behind the prefix


# Blocks of a kind are computed together: the bit length of the number of tokens and, with a window,
# the number of tokens that they see before the block and the group in which they see them.
_Kind = tuple[int, tuple[int, int] | None]


@dataclass(frozen=True)
class Packing:
    """Where the groups of a packed forward are.

    Layers store their keys and values in `cache`, if there is one. With `only_tails` the row has no
    prefixes: attention appends those in `cache` behind the row, and prefix slices are there.
    """

    groups: tuple[Group, ...]
    device: torch.device | str  # where the forward is computed
    cache: PrefixCache | None = None
    only_tails: bool = False
    calls_of_window: dict[Window | None, AttentionCalls] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def of(
        cls,
        groups: Sequence[tuple[int, Sequence[int]]],
        device: torch.device | str,
        cache: PrefixCache | None = None,
        unread: Sequence[int] | None = None,
    ) -> Self:
        """Lay out groups of (prefix length, tail lengths); `unread` as in `Group`, 0 by default."""
        laid_out: list[Group] = []
        prefix_start = 0
        tail_start = sum(prefix for prefix, *_ in groups)
        for (prefix, tails), num_unread in zip(groups, unread or repeat(0), strict=False):
            ends = list(accumulate(tails, initial=tail_start))
            spans = tuple((start, stop) for start, stop in pairwise(ends) if start < stop)
            laid_out.append(Group(slice(prefix_start, prefix_start + prefix), spans, num_unread))
            prefix_start += prefix
            tail_start = ends[-1]
        return cls(tuple(laid_out), device, cache)

    @classmethod
    def of_tails(
        cls, tails: Sequence[Tail], cache: PrefixCache, device: torch.device
    ) -> tuple[slice, Self]:
        """Lay out neighboring tails without prefixes; also return where they are in their row."""
        first = tails[0].start
        last = tails[-1].stop
        groups: list[Group] = []
        for prefix, members in groupby(tails, key=itemgetter(0)):
            spans = tuple((tail.start - first, tail.stop - first) for tail in members)
            behind_row = slice(prefix.start + last - first, prefix.stop + last - first)
            groups.append(Group(behind_row, spans))
        return slice(first, last), cls(tuple(groups), device, cache, only_tails=True)

    @cached_property
    def read_indices(self) -> Tensor | None:
        """Indices (n,) of tokens whose last hidden states are read; None if all are."""
        if not any(group.unread for group in self.groups):
            return None
        spans = [(group.prefix.start + group.unread, group.prefix.stop) for group in self.groups]
        spans += [tail for group in self.groups for tail in group.tails]
        indices = torch.cat([torch.arange(*span) for span in spans])
        return indices.to(self.device, non_blocking=True)

    @property
    def groups_with_prefix(self) -> list[Group]:
        return [group for group in self.groups if group.prefix.start < group.prefix.stop]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: a prefix, or a prefix with a tail."""
        return max((sequence.end for sequence in self._sequences(True)), default=0)

    def _sequences(self, with_prefixes: bool) -> Iterator[_Sequence]:
        for number, group in enumerate(self.groups):
            prefix_start = group.prefix.start
            prefix = group.prefix.stop - prefix_start
            if prefix and with_prefixes:
                yield _Sequence(number, prefix_start, 0, prefix_start, prefix)
            for start, stop in group.tails:
                yield _Sequence(number, prefix_start, prefix, start, prefix + stop - start)

    def attention_calls(self, window: Window | None = None) -> AttentionCalls:
        """Return the kernel calls of a layer with this window, which are made once."""
        if window is not None and self.longest <= window.size:
            window = None
        if window not in self.calls_of_window:
            blocks_of_kind = defaultdict[_Kind, list[_Block]](list)
            for kind, block in self._blocks(window):
                blocks_of_kind[kind].append(block)
            calls = list(self._calls_on_slices()) if window is None else []
            for blocks in blocks_of_kind.values():
                calls += _calls_of_blocks(blocks, self.device, window)
            self.calls_of_window[window] = tuple(calls)
        return self.calls_of_window[window]

    def _calls_on_slices(self) -> Iterator[AttentionCall]:
        """Calls without a window: prefixes see themselves, all tails of a group see its prefix."""
        for group in self.groups_with_prefix:
            if not self.only_tails:
                yield AttentionCall(group.prefix, group.prefix, causal=True)
            if group.tails:
                yield AttentionCall(group.all_tails, group.prefix)

    def _blocks(self, window: Window | None) -> Iterator[tuple[_Kind, _Block]]:
        """Yield tails or, with a window, the blocks of all sequences; each with its kind."""
        with_prefixes = window is not None and not self.only_tails
        for sequence in self._sequences(with_prefixes):
            first = sequence.first
            spans = (
                [(first, sequence.end)] if window is None else window.blocks(first, sequence.end)
            )
            for start, stop in spans:
                # Only blocks right behind the same prefix see the same keys of it.
                group = sequence.group if start == first else -1
                before = None if window is None else (window.reach(start), group)
                count = stop - start
                block = _Block(start, count, first, sequence.prefix_start, sequence.start)
                yield (count.bit_length(), before), block


def _calls_of_blocks(
    blocks: Sequence[_Block], device: torch.device | str, window: Window | None
) -> Iterator[AttentionCall]:
    """Calls of blocks of one kind: they see themselves and, with a window, what is before them."""
    first, count, prefix, prefix_start, start = torch.tensor(blocks).t()[..., None]
    width = int(count.max())
    offsets = torch.arange(width)
    is_real = offsets < count
    # Padding repeats the last token of a tail, where causality hides it from the others.
    queries = start + first - prefix + torch.minimum(offsets, count - 1)
    prefix_starts = tuple(torch.where(prefix > 0, prefix_start, -1)[:, 0].tolist())

    def indices_of(first_position: Tensor, length: int) -> Tensor:
        positions = first_position + torch.arange(length)
        in_prefix = positions < prefix
        return torch.where(in_prefix, prefix_start + positions, start + positions - prefix)

    # Made on the host and read on the device alone, so the host need not wait for the copies.
    def make_call(
        queries: Tensor, keys: Tensor, is_real: Tensor, causal: bool, accumulates: bool
    ) -> AttentionCall:
        return AttentionCall(
            queries=queries.to(device, non_blocking=True),
            keys=keys.to(device, non_blocking=True),
            causal=causal,
            accumulates=accumulates,
            is_real=is_real.to(device, non_blocking=True),
            real_entries=is_real.flatten().nonzero()[:, 0].to(device, non_blocking=True),
            real_indices=queries[is_real].to(device, non_blocking=True),
            prefix_starts=prefix_starts,
        )

    yield make_call(queries, queries, is_real, causal=True, accumulates=window is None)
    if window is None:
        return
    reach = window.reach(blocks[0].first)
    lost = window.num_lost(blocks[0].first, width)
    if lost:
        # Each query sees one key less than the one before it: causal attention in reverse.
        fading = indices_of(first - reach, lost).flip(1)
        yield make_call(queries.flip(1), fading, is_real.flip(1), causal=True, accumulates=True)
    if reach > lost:
        common = indices_of(first - reach + lost, reach - lost)
        if (common == common[:1]).all():  # all blocks see the same keys: one call for all queries
            queries = queries[is_real][None]
            common = common[:1]
            is_real = torch.ones_like(queries, dtype=torch.bool)
        yield make_call(queries, common, is_real, causal=False, accumulates=True)
