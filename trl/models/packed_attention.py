"""Attention in which the completions of one prompt share a single copy of it.

`packed_row` describes the row of tokens that it works on. No mask is built. The keys of a prefix
are read in place; those of tails are gathered by length. On GPUs, the memory-efficient kernel
copies key heads that query heads share: see `trl.ops.attention_kernels`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from ..ops.attention_kernels import (
    Heads,
    apply_attention_sink,
    attention_sink_backward,
    check_kernel,
    choose_kernel,
    merge,
    same_size,
)
from .packed_row import (
    AttentionCall,
    AttentionCalls,
    KeysValues,
    Packing,
    Window,
    add_to_tokens,
    read_tokens,
)
from .patches import Attention, wrap_attention
from .unwrap import causal_model

KEYWORD = "trl_shared_prefix"


@dataclass(frozen=True)
class AttentionOptions:
    """The options of one layer's attention."""

    layer: int
    scale: float  # factor of the products of queries and keys
    window: Window | None = None
    softcap: float | None = None  # bound of the logits
    sink: Tensor | None = None  # (N,) logits of one more key, whose value is 0

    @classmethod
    def of(cls, module: nn.Module, query: Tensor, kwargs: dict[str, Any]) -> Self:
        """Read the options from a layer and from the arguments it calls its attention with."""
        layer = module.layer_idx
        scale = kwargs.get("scaling")
        window_size = kwargs.get("sliding_window")
        window = Window(window_size) if window_size else None
        config = getattr(module, "config", None)
        layer_types = getattr(config, "layer_types", None)
        if config is not None and layer_types and layer_types[layer] == "chunked_attention":
            window = Window(config.attention_chunk_size, is_chunked=True)
        return cls(
            layer=layer,
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            window=window,
            softcap=kwargs.get("softcap"),
            sink=kwargs.get("s_aux"),
        )


class AttentionLayout(Protocol):
    """What a model may be given under `KEYWORD`: it decides what the queries attend to."""

    def attend(self, query: Tensor, keys_values: KeysValues, options: AttentionOptions) -> Tensor:
        """Attend from queries (m, N, T, D), with the keys and values of the same tokens."""


@dataclass(frozen=True)
class Decoding:
    """One new token for each of m rows, whose prefixes are cached once per group."""

    groups: tuple[slice, ...]  # rows of the batch that share a prefix
    # By layer, for each group: keys (1, K, P, D) and values (1, K, P, E).
    layers: Mapping[int, Sequence[KeysValues]]

    def attend(self, query: Tensor, keys_values: KeysValues, options: AttentionOptions) -> Tensor:
        """Attend from the new token (m, N, 1, D) of each row to its prefix and its own tokens.

        `keys_values` are those of the tokens behind the prefix, the new one included.
        """
        kernel = choose_kernel(query, options.softcap)
        value_size = keys_values[1].shape[-1]
        query, own_key, own_value = same_size(query, *keys_values)
        output, normalizer = kernel.forward((query, own_key, own_value), False, options.scale)
        prefix_outputs: list[Tensor] = []
        prefix_normalizers: list[Tensor] = []
        for rows, (key, value) in zip(self.groups, self.layers[options.layer], strict=True):
            if options.window is not None:
                first = options.window.first_visible(key.shape[2], own_key.shape[2])
                key = key[:, :, first:]
                value = value[:, :, first:]
            if key.shape[2]:
                # The rows of a group are the queries of one attention to their prefix.
                qkv = query[rows].transpose(0, 2), *same_size(query, key, value)[1:]
                group_output, group_normalizer = kernel.forward(qkv, False, options.scale)
                prefix_outputs.append(group_output.transpose(0, 2))
                prefix_normalizers.append(group_normalizer.transpose(0, 2))
            else:
                prefix_outputs.append(torch.zeros_like(output[rows]))
                prefix_normalizers.append(torch.full_like(normalizer[rows], -torch.inf))
        prefix_results = torch.cat(prefix_outputs), torch.cat(prefix_normalizers)
        output, normalizer = merge(prefix_results, (output, normalizer))
        if options.sink is not None:
            output, _ = apply_attention_sink(output, normalizer, options.sink)
        return output[..., :value_size]


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        calls: AttentionCalls,
        options: AttentionOptions,
        sink: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        query, key, value = inputs
        kernel = choose_kernel(query, options.softcap)
        if _is_causal(calls, query):
            output, normalizer = kernel.forward(inputs, True, options.scale)
        else:
            # A token without a prefix has attended to nothing before it attends to itself.
            output = torch.zeros_like(query)
            wide = torch.promote_types(query.dtype, torch.float32)
            normalizer = query.new_full(query.shape[:3], -torch.inf, dtype=wide)
            for call in calls:
                qkv = (
                    read_tokens(query, call.queries),
                    read_tokens(key, call.keys),
                    read_tokens(value, call.keys),
                )
                results = kernel.forward(qkv, call.causal, options.scale)
                if call.accumulates:
                    earlier_output = read_tokens(output, call.queries)
                    earlier_normalizer = read_tokens(normalizer, call.queries)
                    results = merge((earlier_output, earlier_normalizer), results)
                call.write(output, results[0])
                call.write(normalizer, results[1])
        if sink is not None:
            output, normalizer = apply_attention_sink(output, normalizer, sink)
        ctx.calls = calls
        ctx.options = options
        ctx.save_for_backward(sink, *inputs, output, normalizer)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        sink, *saved = ctx.saved_tensors
        query, key, value, output, normalizer = saved
        kernel = choose_kernel(query, ctx.options.softcap)
        scale = ctx.options.scale
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        grad_sink = None
        if sink is not None:
            grad_sink = attention_sink_backward(grad, output, normalizer, sink)
        if _is_causal(ctx.calls, query):
            return None, None, grad_sink, *kernel.backward(grad, tuple(saved), True, scale)
        grad_query = torch.zeros_like(query)
        grad_key = torch.zeros_like(key)
        grad_value = torch.zeros_like(value)
        for call in ctx.calls:
            upstream = read_tokens(grad, call.queries)
            if call.is_real is not None:  # padding must add nothing
                upstream = upstream * call.is_real[:, None, :, None]
            saved_of_call = (
                read_tokens(query, call.queries),
                read_tokens(key, call.keys),
                read_tokens(value, call.keys),
                read_tokens(output, call.queries),
                read_tokens(normalizer, call.queries),
            )
            gradients = kernel.backward(upstream, saved_of_call, call.causal, scale)
            add_to_tokens(grad_query, call.queries, gradients[0])
            add_to_tokens(grad_key, call.keys, gradients[1])
            add_to_tokens(grad_value, call.keys, gradients[2])
        return None, None, grad_sink, grad_query, grad_key, grad_value


def _is_causal(calls: AttentionCalls, query: Tensor) -> bool:
    """Whether the calls are causal attention of one whole row, which needs no indices."""
    if len(calls) != 1 or calls[0].real_indices is not None:
        return False
    row = slice(0, query.shape[2])
    return calls[0] == AttentionCall(row, row, causal=True)


def packed_attention(
    query: Tensor, keys_values: KeysValues, packing: Packing, options: AttentionOptions
) -> Tensor:
    """Attend from every token of a packed row (1, N, T, D) to what it may see: (1, N, T, E).

    `keys_values` are keys (1, K, T, D) and values (1, K, T, E) of the row; N is a multiple of K.
    """
    if packing.cache is not None:
        # The cache keeps what the prefixes stored first: tails, which come later, store nothing.
        cached_keys, cached_values = packing.cache.keep(options.layer, keys_values)
        packing.cache.windows[options.layer] = options.window
        if packing.only_tails:
            keys = torch.cat([keys_values[0], _separate_gradient(cached_keys)], 2)
            values = torch.cat([keys_values[1], _separate_gradient(cached_values)], 2)
            keys_values = keys, values
    # The graph must not hold the cache: the cached tensors hold the graph, so it would never go.
    return attend(packing.attention_calls(options.window), query, keys_values, options)


def _separate_gradient(cached: Tensor) -> Tensor:
    """Return the tensor with a gradient that is a copy.

    A view would hold the gradient of the whole row in memory until the backward of all layers ends.
    """
    cached = cached.view_as(cached)
    if cached.requires_grad:
        cached.register_hook(torch.clone)
    return cached


def attend(
    calls: AttentionCalls, query: Tensor, keys_values: KeysValues, options: AttentionOptions
) -> Tensor:
    """Attend from queries (1, N, T, D) to keys and values, by these kernel calls: (1, N, T, E)."""
    value_size = keys_values[1].shape[-1]
    qkv = same_size(query, *keys_values)
    # The sink needs a gradient, so it must be an argument of its own.
    without_sink = replace(options, sink=None)
    return _PackedAttention.apply(calls, without_sink, options.sink, *qkv)[..., :value_size]


# The heads of layers that attended by a layout; None outside `checked_kernels`.
_attended_heads: ContextVar[set[Heads] | None] = ContextVar("attended_heads", default=None)


@contextmanager
def checked_kernels(model: nn.Module) -> Iterator[None]:
    """Let a model's attention follow layouts, and check the kernels that it calls in the block.

    Raises a RuntimeError if a kernel is wrong, or if no layer called the attention function.
    """
    install(model)
    attended = set[Heads]()
    token = _attended_heads.set(attended)
    try:
        yield
    finally:
        _attended_heads.reset(token)
    if not attended:
        raise RuntimeError("its layers did not call the attention function")
    for heads in attended:
        example = torch.empty(0, heads.size, dtype=heads.dtype, device=heads.device)
        check_kernel(choose_kernel(example), heads)


def install(model: nn.Module) -> None:
    """Let a model's attention follow a layout given as `KEYWORD`; otherwise nothing changes."""
    wrap_attention(model, causal_model(model).config.get_text_config(), _follow_layouts)


def _follow_layouts(original: Attention) -> Attention:
    if hasattr(original, "trl_original"):
        return original

    # Some models pass the mask by name, others by position.
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, object]:
        layout: AttentionLayout | Packing | None = kwargs.pop(KEYWORD, None)
        if layout is None:
            return original(module, query, key, value, *mask, **kwargs)
        # `packed_inputs` passes a mask of one entry; a larger one was made by the layer itself.
        own_mask = mask[0] if mask else kwargs.get("attention_mask")
        has_own_mask = own_mask is not None and own_mask.numel() > 1
        if has_own_mask or kwargs.get("position_bias") is not None:
            raise NotImplementedError("its layers build attention masks of their own")
        options = AttentionOptions.of(module, query, kwargs)
        query = query.to(value.dtype)
        key = key.to(value.dtype)
        attended = _attended_heads.get()
        if attended is not None:
            size = max(query.shape[-1], value.shape[-1])
            attended.add(Heads(query.device, query.dtype, query.shape[1], key.shape[1], size))
        if isinstance(layout, Packing):
            output = packed_attention(query, (key, value), layout, options)
        else:
            output = layout.attend(query, (key, value), options)
        return output.transpose(1, 2).contiguous(), None

    attention.trl_original = original  # type: ignore[attr-defined]
    return attention
