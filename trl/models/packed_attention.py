"""Attention in which completions of one prompt see a single copy of it.

See `packed_places` for the row of tokens that it works on. No mask is built, and the keys of a
prefix are read where they are; those of tails are gathered by length, and the memory-efficient
kernel of GPUs repeats heads that are shared: see `trl.ops.attention_kernels`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..ops.attention_kernels import (
    Heads,
    apply_attention_sink,
    attention_sink_backward,
    check_kernel,
    choose_kernel,
    merge,
    same_size,
)
from .packed_places import Packing, Part, Parts, Window, add, take
from .patches import wrap_attention
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
    def of(cls, module: Any, query: Tensor, options: dict[str, Any]) -> Self:
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
        """Attend from one new token (m, N, 1, D) of each row to its prefix and its `own` tokens."""
        kernel, size = choose_kernel(query, rules.cap), own[1].shape[-1]
        query, own_key, own_value = same_size(query, *own)
        output, normalizer = kernel.forward((query, own_key, own_value), False, rules.scale)
        parts = []
        for rows, (key, value) in zip(self.groups, self.layers[rules.layer], strict=True):
            if rules.window is not None:
                first = rules.window.first(key.shape[2], own_key.shape[2])
                key, value = key[:, :, first:], value[:, :, first:]
            if key.shape[2]:
                # The rows of a group are queries of one attention to their prefix.
                heads = query[rows].transpose(0, 2), *same_size(query, key, value)[1:]
                found = kernel.forward(heads, False, rules.scale)
                parts.append([new.transpose(0, 2) for new in found])
            else:
                nothing = torch.full_like(normalizer[rows], -torch.inf)
                parts.append([torch.zeros_like(output[rows]), nothing])
        before = torch.cat([x for x, _ in parts]), torch.cat([x for _, x in parts])
        output, normalizer = merge(before, (output, normalizer))
        if rules.sink is not None:
            output, _ = apply_attention_sink(output, normalizer, rules.sink)
        return output[..., :size]


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parts: Parts, rules: Rules, sink: Tensor | None, *inputs: Tensor
    ) -> Tensor:
        query, key, value = inputs
        kernel = choose_kernel(query, rules.cap)
        if _is_causal(parts, query):
            output, normalizer = kernel.forward(inputs, True, rules.scale)
        else:
            # What has no prefix has attended to nothing before it attends to itself.
            output, wide = torch.zeros_like(query), torch.promote_types(query.dtype, torch.float32)
            normalizer = query.new_full(query.shape[:3], -torch.inf, dtype=wide)
            for part in parts:
                tensors = take(query, part.queries), take(key, part.keys), take(value, part.keys)
                found = kernel.forward(tensors, part.causal, rules.scale)
                if part.again:
                    before = take(output, part.queries), take(normalizer, part.queries)
                    found = merge(before, found)
                part.put(output, found[0])
                part.put(normalizer, found[1])
        if sink is not None:
            output, normalizer = apply_attention_sink(output, normalizer, sink)
        ctx.parts, ctx.rules = parts, rules
        ctx.save_for_backward(sink, *inputs, output, normalizer)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        sink, *saved = ctx.saved_tensors
        query, key, value, output, normalizer = saved
        kernel, scale = choose_kernel(query, ctx.rules.cap), ctx.rules.scale
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        of_sink = None if sink is None else attention_sink_backward(grad, output, normalizer, sink)
        if _is_causal(ctx.parts, query):
            return None, None, of_sink, *kernel.backward(grad, tuple(saved), True, scale)
        of_query, of_key, of_value = (torch.zeros_like(x) for x in (query, key, value))
        for part in ctx.parts:
            upstream, *tensors = (take(x, part.queries) for x in (grad, query, output, normalizer))
            if part.exists is not None:  # a repeat must add nothing
                upstream = upstream * part.exists[:, None, :, None]
            tensors[1:1] = take(key, part.keys), take(value, part.keys)
            found = kernel.backward(upstream, tuple(tensors), part.causal, scale)
            add(of_query, part.queries, found[0])
            add(of_key, part.keys, found[1])
            add(of_value, part.keys, found[2])
        return None, None, of_sink, of_query, of_key, of_value


def _is_causal(parts: Parts, query: Tensor) -> bool:
    """Whether it is causal attention of one row, which needs no places."""
    row = slice(0, query.shape[2])
    return len(parts) == 1 and parts[0].places is None and parts[0] == Part(row, row, causal=True)


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
    return attend_to(layout.parts(rules.window), query, own, rules)


def _apart(known: Tensor) -> Tensor:
    known = known.view_as(known)
    if known.requires_grad:  # a view as gradient would keep that of the row until all layers end
        known.register_hook(torch.clone)
    return known


def attend_to(parts: Parts, query: Tensor, keys: tuple[Tensor, Tensor], rules: Rules) -> Tensor:
    """Attend to keys and values as `parts` say."""
    size = keys[1].shape[-1]
    tensors = same_size(query, *keys)
    # The sink has a gradient, so the graph is given it apart.
    given, sink = replace(rules, sink=None), rules.sink
    return _PackedAttention.apply(parts, given, sink, *tensors)[..., :size]


# With what layers have attended by a layout; None outside `checked_kernels`.
_attended: ContextVar[set[Heads] | None] = ContextVar("attended", default=None)


@contextmanager
def checked_kernels(model: nn.Module) -> Iterator[None]:
    """Let attention understand layouts; check the kernels of its calls inside, at least one."""
    install(model)
    attended = set[Heads]()
    token = _attended.set(attended)
    try:
        yield
    finally:
        _attended.reset(token)
    if not attended:
        raise RuntimeError("its layers did not call the attention function")
    for heads in attended:
        example = torch.empty(0, heads.size, dtype=heads.dtype, device=heads.device)
        check_kernel(choose_kernel(example), heads)


def install(model: nn.Module) -> None:
    """Let a model's attention understand layouts; without their keyword it does what it did."""
    wrap_attention(model, causal_model(model).config.get_text_config(), _aware)


def _aware(original: Any) -> Any:
    if hasattr(original, "trl_original"):
        return original

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
            raise NotImplementedError("its layers build attention masks of their own")
        rules = Rules.of(module, query, kwargs)
        query, key = query.to(value.dtype), key.to(value.dtype)
        size = max(query.shape[-1], value.shape[-1])
        attended = _attended.get()
        if attended is not None:
            attended.add(Heads(query.device, query.dtype, query.shape[1], key.shape[1], size))
        if isinstance(layout, Packing):
            found = packed_attention(query, (key, value), layout, rules)
        else:
            found = layout.attend(query, (key, value), rules)
        return found.transpose(1, 2).contiguous(), None

    attention.trl_original = original  # type: ignore[attr-defined]
    return attention
