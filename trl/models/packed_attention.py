"""Attention in which completions of one prompt see a single copy of it.

See `packed_places` for the row of tokens that it works on. No mask is built, and the keys of a
prefix are read where they are; those of tails are gathered by length, and the memory-efficient
kernel of GPUs repeats heads that are shared: see `trl.ops.attention_kernels`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ..ops.attention_kernels import (
    Heads,
    Kernel,
    check_kernel,
    choose_kernel,
    drain,
    drain_backward,
    merge,
    same_size,
)
from .packed_places import Packing, Places, Window, gather
from .unwrap import causal_model

KEYWORD = "trl_shared_prefix"


@dataclass(frozen=True)
class Rules:
    """How a layer attends."""

    layer: int
    scale: float  # factor of the products of queries and keys
    window: Window | None = None
    cap: float | None = None  # what products are bent to stay below
    sink: Tensor | None = None  # (N,) products with one more key, whose value is 0

    @classmethod
    def of(cls, module: Any, query: Tensor, options: dict[str, Any]) -> Rules:
        """Read them off a layer and what it calls its attention with."""
        layer, scale, size = module.layer_idx, options.get("scaling"), options.get("sliding_window")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        window = Window(size) if size else None
        config: Any = getattr(module, "config", None)
        kinds = getattr(config, "layer_types", None)
        if kinds and kinds[layer] == "chunked_attention":
            window = Window(config.attention_chunk_size, is_chunked=True)
        return cls(layer, scale, window, options.get("softcap"), options.get("s_aux"))


@dataclass(frozen=True)
class Decoding:
    """One new token for each of m rows, whose prefixes are kept once for each group."""

    groups: tuple[slice, ...]  # rows of the batch that share a prefix
    # For each layer and group, keys (1, K, P, D) and values (1, K, P, E).
    layers: Mapping[int, Sequence[tuple[Tensor, Tensor]]]

    def attend(self, query: Tensor, own: tuple[Tensor, Tensor], rules: Rules) -> Tensor:
        """Attend from one new token (m, N, 1, D) of each row to its prefix and to its own tokens.

        `own` are keys (m, K, t, D) and values (m, K, t, E) of what the rows generated; the rest is
        as in `packed_attention`.
        """
        kernel, size = choose_kernel(query, rules.cap), own[1].shape[-1]
        query, own_key, own_value = same_size(query, *own)
        output, normalizer = kernel.forward((query, own_key, own_value), False, rules.scale)
        before = torch.zeros_like(output), torch.full_like(normalizer, -torch.inf)
        for rows, (key, value) in zip(self.groups, self.layers[rules.layer], strict=True):
            if rules.window is not None:
                first = rules.window.first(key.shape[2], own_key.shape[2])
                key, value = key[:, :, first:], value[:, :, first:]
            _, key, value = same_size(query, key, value)
            if not key.shape[2]:
                continue
            # The rows of a group are queries of one attention to their prefix.
            part = query[rows].transpose(0, 2), key, value
            found = kernel.forward(part, False, rules.scale)
            for place, new in zip(before, found, strict=True):
                place[rows] = new.transpose(0, 2)
        output, normalizer = merge(before, (output, normalizer))
        if rules.sink is not None:
            output, _ = drain(output, normalizer, rules.sink)
        return output[..., :size]


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, places: Places, rules: Rules, sink: Tensor | None, *inputs: Tensor
    ) -> Tensor:
        ctx.places, ctx.rules = places, rules
        kernel = choose_kernel(inputs[0], rules.cap)
        if places.is_causal(inputs[0].shape[2]):
            output, normalizer = kernel.forward(inputs, True, rules.scale)
        else:
            output, normalizer = _attend(kernel, places, rules.scale, *inputs)
        if sink is not None:
            output, normalizer = drain(output, normalizer, sink)
        ctx.save_for_backward(sink, *inputs, output, normalizer)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        sink, *saved = ctx.saved_tensors
        kernel, scale = choose_kernel(saved[0], ctx.rules.cap), ctx.rules.scale
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        output, normalizer = saved[-2:]
        of_sink = None if sink is None else drain_backward(grad, output, normalizer, sink)
        if ctx.places.is_causal(grad.shape[2]):
            found = kernel.backward(grad, tuple(saved), True, scale)
        else:
            found = _attend_backward(kernel, ctx.places, scale, (grad, *saved))
        return None, None, of_sink, *found


def _attend(
    kernel: Kernel, places: Places, scale: float, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    # What has no prefix has attended to nothing before it attends to itself.
    output, normalizer = torch.zeros_like(query), query.new_full(query.shape[:3], -torch.inf)
    normalizer = normalizer.to(torch.promote_types(query.dtype, torch.float32))
    for span in places.spans:
        at = span.queries
        part = query[:, :, at], key[:, :, span.keys], value[:, :, span.keys]
        found = kernel.forward(part, span.causal, scale)
        if span.again:
            found = merge((output[:, :, at], normalizer[:, :, at]), found)
        output[:, :, at], normalizer[:, :, at] = found
    for bucket in places.buckets:
        tokens = gather(query, bucket.index)
        total = gather(output, bucket.index), gather(normalizer, bucket.index)
        for sight in bucket.sights:
            part = sight.turn(tokens), gather(key, sight.index), gather(value, sight.index)
            one, other = kernel.forward(part, sight.causal, scale)
            rows = len(tokens)
            total = merge(total, (sight.turn_back(one, rows), sight.turn_back(other, rows)))
        for place, found in zip((output, normalizer), total, strict=True):
            place[0].index_copy_(1, bucket.places, bucket.tokens(found).to(place.dtype))
    return output, normalizer


def _attend_backward(
    kernel: Kernel, places: Places, scale: float, saved: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    grad, query, key, value, output, normalizer = saved
    of_query, of_key, of_value = (torch.zeros_like(x) for x in (query, key, value))
    for span in places.spans:
        upstream, *part = (x[:, :, span.queries] for x in (grad, query, output, normalizer))
        part[1:1] = key[:, :, span.keys], value[:, :, span.keys]
        found = kernel.backward(upstream, tuple(part), span.causal, scale)
        of_query[:, :, span.queries] += found[0]
        of_key[:, :, span.keys] += found[1]
        of_value[:, :, span.keys] += found[2]
    for bucket in places.buckets:
        tokens = [gather(x, bucket.index) for x in (grad, query, output, normalizer)]
        tokens[0] = tokens[0] * bucket.exists[:, None, :, None]  # a repeat must add nothing
        for sight in bucket.sights:
            upstream, *part = map(sight.turn, tokens)
            part[1:1] = gather(key, sight.index), gather(value, sight.index)
            found = kernel.backward(upstream, tuple(part), sight.causal, scale)
            mine = bucket.tokens(sight.turn_back(found[0], len(tokens[0])))
            of_query[0].index_add_(1, bucket.places, mine)
            sight.add(of_key, found[1])
            sight.add(of_value, found[2])
    return of_query, of_key, of_value


def packed_attention(
    query: Tensor, own: tuple[Tensor, Tensor], layout: Packing, rules: Rules
) -> Tensor:
    """Attend from every token of a packed row (1, N, T, D) to what it may see: (1, N, T, E).

    `own` are keys (1, K, T, D) and values (1, K, T, E) of the row; N is a multiple of K.
    """
    if layout.kept is not None:
        # Not again when activations are recomputed, and not by tails, which come later.
        known = layout.kept.setdefault(rules.layer, own)
        layout.kept.windows[rules.layer] = rules.window
        if layout.tails_alone:
            own = torch.cat([own[0], _apart(known[0])], 2), torch.cat([own[1], _apart(known[1])], 2)
    # The graph is not given `kept`: it would hold itself, since the kept tensors hold the graph.
    return attend_to_places(query, own, layout.places(rules.window), rules)


def _apart(known: Tensor) -> Tensor:
    known = known.view_as(known)
    if known.requires_grad:  # a view as gradient would keep that of the row until all layers end
        known.register_hook(torch.clone)
    return known


def attend_to_places(
    query: Tensor, keys: tuple[Tensor, Tensor], places: Places, rules: Rules
) -> Tensor:
    """Attend to keys and values as `places` say."""
    size = keys[1].shape[-1]
    tensors = same_size(query, *keys)
    # The sink has a gradient, so the graph is given it apart.
    given, sink = replace(rules, sink=None), rules.sink
    return _PackedAttention.apply(places, given, sink, *tensors)[..., :size]


_attended: set[Heads] = set()  # with what layers have attended by a layout


@contextmanager
def checked_kernels(model: nn.Module) -> Iterator[None]:
    """Let the attention of a model understand layouts; check the kernels of its calls inside.

    It is an error if there were none.
    """
    install(model)
    _attended.clear()
    yield
    if not _attended:
        raise RuntimeError("its layers did not ask for attention")
    for heads in _attended:
        example = torch.empty(0, heads.size, dtype=heads.dtype, device=heads.device)
        check_kernel(choose_kernel(example), heads)


def install(model: nn.Module) -> None:
    """Let the attention of a model of transformers understand the layouts of this module.

    Without the keyword of a layout it does exactly what it did before.
    """
    implementation = causal_model(model).config.get_text_config()._attn_implementation
    if implementation == "eager":  # in no table: each file of models has its own
        tables = [
            getattr(inspect.unwrap(type(module).forward), "__globals__", {})
            for module in model.modules()
        ]
        implementation = "eager_attention_forward"
    else:
        tables = [AttentionInterface._global_mapping]
    for table in tables:
        original = table.get(implementation)
        if original is not None and not hasattr(original, "trl_original"):
            table[implementation] = _aware(original)


def _aware(original: Any) -> Any:
    # Some models name the mask when they call this, others do not.
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        layout = kwargs.pop(KEYWORD, None)
        if layout is None:
            return original(module, query, key, value, *mask, **kwargs)
        # What stands for the layout comes as a mask of one entry; nothing else would be read.
        own = [*mask, kwargs.get("attention_mask")][0]
        if (own is not None and own.numel() > 1) or kwargs.get("position_bias") is not None:
            raise NotImplementedError("its layers make attention masks of their own")
        rules = Rules.of(module, query, kwargs)
        query, key = query.to(value.dtype), key.to(value.dtype)
        size = max(query.shape[-1], value.shape[-1])
        _attended.add(Heads(query.device, query.dtype, query.shape[1], key.shape[1], size))
        if isinstance(layout, Packing):
            found = packed_attention(query, (key, value), layout, rules)
        else:
            found = layout.attend(query, (key, value), rules)
        return found.transpose(1, 2).contiguous(), None

    attention.trl_original = original  # type: ignore[attr-defined]
    return attention
