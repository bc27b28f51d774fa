"""Attention in which completions of one prompt see a single copy of it.

Tokens of a forward lie in one row without padding: first the prefixes of all groups, then the tails
of their completions. A prefix attends to itself, causally; a tail to the prefix of its group and,
causally, to itself. No mask is built, and the keys of a prefix are read where they are; those of
tails are gathered by length, and the memory-efficient kernel of GPUs repeats heads that are shared:
see `trl.ops.attention_kernels`.

The row may be cut into passes: one over the prefixes, whose keys and values are kept, and some over
tails, which read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ..ops.attention_kernels import choose_kernel, merge

KEYWORD = "trl_shared_prefix"


class Layers(dict[int, tuple[Tensor, Tensor]]):
    """Keys and values (1, K, T, D) by index of the layer."""


@dataclass(frozen=True)
class Group:
    """Places of one group in the row: its prefix, and its tails one after the other."""

    prefix: slice
    tails: slice
    cuts: tuple[tuple[int, int], ...] = ()  # where each tail that has tokens starts and stops


@dataclass(frozen=True)
class Bucket:
    """Tails of similar length; a boolean index would make the host wait, in every layer."""

    index: Tensor  # (n, w) places in the row; a shorter tail repeats its last one
    exists: Tensor  # (n, w) bool: False at the repeats
    cells: Tensor  # (e,) places in the flattened (n, w), repeats left out
    places: Tensor  # (e,) their places in the row, each once

    def gather(self, packed: Tensor) -> Tensor:
        """Take the places of (1, N, T, ...): (n, N, w, ...)."""
        return packed[0][:, self.index].transpose(0, 1)

    def tokens(self, values: Tensor) -> Tensor:
        """Drop the repeats of (n, N, w, ...): (N, e, ...)."""
        return values.transpose(0, 1).flatten(1, 2).index_select(1, self.cells)


@dataclass(frozen=True)
class Packing:
    """Where the groups of a packed forward are.

    `buckets` hold the tails of similar length. Repeats stand behind a tail, where causality hides
    them. Keys and values of every layer are put into `kept`, if there is one; a row of tails alone
    takes those of the prefixes from there.
    """

    groups: tuple[Group, ...]
    buckets: tuple[Bucket, ...]
    kept: Layers | None = None
    tails_alone: bool = False

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


def make_buckets(cuts: Iterable[tuple[int, int]], device: torch.device | str) -> tuple[Bucket, ...]:
    """Put tails (start, stop) together whose lengths lie between two powers of two."""
    by_size: dict[int, list[tuple[int, int]]] = {}
    for start, stop in cuts:
        by_size.setdefault((stop - start).bit_length(), []).append((start, stop - start))
    return tuple(_bucket(members, device) for members in by_size.values())


def _bucket(tails: Sequence[tuple[int, int]], device: torch.device | str) -> Bucket:
    starts, lengths = torch.tensor(tails).t()
    offsets = torch.arange(int(lengths.max()))
    exists = offsets < lengths[:, None]
    index = starts[:, None] + torch.minimum(offsets, lengths[:, None] - 1)
    found = index, exists, exists.flatten().nonzero()[:, 0], index[exists]
    # Made here and read on the device alone, so the host need not wait for the copies.
    return Bucket(*(x.to(device, non_blocking=True) for x in found))


@dataclass(frozen=True)
class Decoding:
    """One new token for each of m rows, whose prefixes are kept once for each group.

    Args:
        groups: rows of the batch that share a prefix.
        keys, values: for each layer and group, (1, K, P, D).
    """

    groups: tuple[slice, ...]
    keys: tuple[tuple[Tensor, ...], ...]
    values: tuple[tuple[Tensor, ...], ...]


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: Packing, scale: float, query: Tensor, *keys: Tensor) -> Tensor:
        kernel = choose_kernel(query)
        ctx.layout, ctx.scale = layout, scale
        if _is_one_prefix(layout):
            output, normalizer = kernel.forward(query, keys[0], keys[1], True, scale)
            ctx.save_for_backward(output, normalizer, query, *keys)
            return output
        # What has no prefix has attended to nothing before it attends to itself.
        output = torch.zeros_like(query)
        normalizer = query.new_full(
            query.shape[:3], -torch.inf, dtype=torch.promote_types(query.dtype, torch.float32)
        )
        for part in _parts(layout):
            key, value = part.of(keys)
            found = kernel.forward(query[:, :, part.queries], key, value, part.causal, scale)
            output[:, :, part.queries], normalizer[:, :, part.queries] = found
        for bucket in layout.buckets:
            gathered = tuple(map(bucket.gather, (query, *keys[:2])))
            own = kernel.forward(gathered[0], gathered[1], gathered[2], True, scale)
            merged = merge((bucket.gather(output), bucket.gather(normalizer)), own)
            for total, part in zip((output, normalizer), merged, strict=True):
                total[0].index_copy_(1, bucket.places, bucket.tokens(part).to(total.dtype))
        ctx.save_for_backward(output, normalizer, query, *keys)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        output, normalizer, query, *keys = ctx.saved_tensors
        kernel = choose_kernel(query)
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        if _is_one_prefix(ctx.layout):
            saved = (query, *keys, output, normalizer)
            return None, None, *kernel.backward(grad, saved, True, ctx.scale)
        of_query, of_keys = torch.zeros_like(query), [torch.zeros_like(key) for key in keys]
        for part in _parts(ctx.layout):
            at = part.queries
            saved = (query[:, :, at], *part.of(keys), output[:, :, at], normalizer[:, :, at])
            found = kernel.backward(grad[:, :, at], saved, part.causal, ctx.scale)
            of_query[:, :, at] = found[0]
            for total, more in zip(part.of(of_keys), found[1:], strict=True):
                total += more
        everything = (query, *keys[:2], output, normalizer)
        for bucket in ctx.layout.buckets:
            # A repeated place must add nothing.
            upstream = bucket.gather(grad) * bucket.exists[:, None, :, None]
            saved = tuple(map(bucket.gather, everything))
            found = kernel.backward(upstream, saved, True, ctx.scale)
            for total, more in zip((of_query, *of_keys[:2]), found, strict=True):
                total[0].index_add_(1, bucket.places, bucket.tokens(more))
        return None, None, of_query, *of_keys


def _is_one_prefix(layout: Packing) -> bool:
    """Whether a layout is plain causal attention, which needs no places."""
    return len(layout.groups) == 1 and not layout.buckets


@dataclass(frozen=True)
class _Part:
    """Queries that attend to one prefix."""

    queries: slice
    prefix: slice
    causal: bool
    source: int  # where its keys are among all keys and values

    def of(self, keys: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The keys and values of the prefix, as views."""
        key, value = keys[self.source : self.source + 2]
        return key[:, :, self.prefix], value[:, :, self.prefix]


def _parts(layout: Packing) -> Iterator[_Part]:
    for number, group in enumerate(layout.groups):
        if group.prefix.start == group.prefix.stop:
            continue
        if layout.tails_alone:
            yield _Part(group.tails, slice(None), False, 2 * number + 2)
            continue
        yield _Part(group.prefix, group.prefix, True, 0)
        if group.tails.stop > group.tails.start:
            yield _Part(group.tails, group.prefix, False, 0)


def packed_attention(
    query: Tensor,
    own: tuple[Tensor, Tensor],
    layout: Packing,
    layer: int,
    scale: float,
) -> Tensor:
    """Attend from every token of a packed row (1, N, T, D) to what it may see: (1, N, T, D).

    Args:
        query (`Tensor`): (1, N, T, D).
        own (`tuple[Tensor, Tensor]`): keys and values (1, K, T, D) of the row; N is a multiple of
            K.
        layout (`Packing`): where prefixes and tails are.
        layer, scale: index of the layer; factor of the products of queries and keys.
    """
    more: list[Tensor] = []
    if layout.kept is not None:
        # Not again when activations are recomputed, and not by tails, which come later.
        known = layout.kept.setdefault(layer, own)
        if layout.tails_alone:
            more = [states[:, :, group.prefix] for group in layout.groups for states in known]
    # A graph that held `kept` would hold itself, since the kept tensors hold the graph.
    places = replace(layout, kept=None)
    return _PackedAttention.apply(places, scale, query, *own, *more)


def decoding_attention(
    query: Tensor, own: tuple[Tensor, Tensor], decoding: Decoding, layer: int, scale: float
) -> Tensor:
    """Attend from one new token of each row to its prefix and to its own tokens.

    Args:
        query (`Tensor`): (m, N, 1, D).
        own (`tuple[Tensor, Tensor]`): keys and values (m, K, t, D) of what the rows generated.
        decoding (`Decoding`): the shared prefixes.
        layer, scale: as in `packed_attention`.
    """
    kernel = choose_kernel(query)
    output = torch.empty_like(query)
    normalizer = query.new_empty(
        query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32)
    )
    parts = zip(decoding.groups, decoding.keys[layer], decoding.values[layer], strict=True)
    for rows, key, value in parts:
        # The rows of a group are queries of one attention to their prefix.
        found = kernel.forward(query[rows].transpose(0, 2), key, value, False, scale)
        output[rows] = found[0].transpose(0, 2)
        normalizer[rows] = found[1].transpose(0, 2)
    merged, _ = merge((output, normalizer), kernel.forward(query, *own, False, scale))
    return merged


def visible(packing: Packing, total: int) -> Tensor:
    """The mask (T, T) that a packing stands for: True where a token may look."""
    mask = torch.zeros(total, total, dtype=torch.bool)
    for group in packing.groups:
        mask[group.tails, group.prefix] = True
        mask[group.prefix, group.prefix] = True
        for start, stop in group.cuts:
            mask[start:stop, start:stop] = True
    return mask.tril()


def install(implementation: str) -> None:
    """Let an attention implementation of transformers understand the layouts of this module.

    Without the keyword of a layout the implementation does exactly what it did before.
    """
    table = AttentionInterface._global_mapping
    original = table[implementation]
    if not hasattr(original, "trl_original"):
        AttentionInterface.register(implementation, _aware(original))


def _aware(original: Any) -> Any:
    # Some models name the mask when they call this, others do not.
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        layout = kwargs.pop(KEYWORD, None)
        if layout is None:
            return original(module, query, key, value, *mask, **kwargs)
        if kwargs.get("softcap") is not None:
            raise NotImplementedError("soft-capped attention has no shared layout")
        # What stands for the layout comes as a mask of one entry; nothing else would be read.
        own = [*mask, kwargs.get("attention_mask")][0]
        if own is not None and own.numel() > 1:
            raise NotImplementedError("its layers make attention masks of their own")
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        query, key = query.to(value.dtype), key.to(value.dtype)
        if isinstance(layout, Decoding):
            found = decoding_attention(query, (key, value), layout, module.layer_idx, scale)
        elif isinstance(layout, Packing):
            found = packed_attention(query, (key, value), layout, module.layer_idx, scale)
        else:  # a layout of another module
            found = layout.attend(query, (key, value), scale)
        return found.transpose(1, 2).contiguous(), None

    attention.trl_original = original  # type: ignore[attr-defined]
    return attention
