"""The check that a kernel computes attention and its gradients, on a small example."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from ..ops.attention_kernels import Kernel
from . import packed_attention as shared_attention
from .packed_attention import Rules, install, packed_attention, visible
from .packed_places import Packing

# Prefix and tail lengths: longer than the blocks of 32 and 64 tokens that kernels work in; the
# last are documents.
EXAMPLE = ((70, (3, 0, 40, 1)), (9, (2, 2)), (0, (5, 1)))
HALF = (torch.float16, torch.bfloat16)
# Times the error of masked attention; merging two attentions rounds twice where that rounds once,
# which comes to 1.5 on CPUs.
FACTOR = 3.0


@dataclass(frozen=True)
class Heads:
    """What the attention of a layer works on."""

    queries: int
    keys: int
    size: int
    value_size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.queries} heads on {self.keys}, of size {self.size} in {dtype}"


@contextmanager
def noted_heads(model: nn.Module) -> Iterator[set[Heads]]:
    """Let the attention of a model understand layouts, and note what layers call it with."""
    install(model)
    found = set[Heads]()

    def watch(query: Tensor, key: Tensor, value: Tensor) -> None:
        sizes = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
        found.add(Heads(*sizes, value.dtype))

    shared_attention.watchers.append(watch)
    try:
        yield found
    finally:
        shared_attention.watchers.remove(watch)


def check_kernels(device: torch.device, layers: Collection[Heads]) -> None:
    """Compare outputs and gradients with masked attention, for each kind of layer of `noted_heads`.

    It is an error if they are further from full precision than rounding explains, and without
    layers. What a process has checked of a kernel is not checked again.
    """
    if not layers:
        raise RuntimeError("its layers did not ask for attention")
    for heads in layers:
        query = torch.empty(1, heads.queries, 0, heads.size, device=device, dtype=heads.dtype)
        _check(device, heads, shared_attention.choose_kernel(query))


@cache
def _check(device: torch.device, heads: Heads, kernel: Kernel) -> None:
    """Check the kernel that `packed_attention` chooses, which is `kernel`."""
    packing = Packing.of(EXAMPLE, device)
    tensors = _example(device, heads)
    rules = Rules(0, heads.size**-0.5)
    mask = visible(packing, tensors[0].shape[2]).to(device)

    def shared(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return packed_attention(query, (key, value), packing, rules)

    def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeats = heads.queries // heads.keys
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=rules.scale
        )

    with torch.autocast(device.type, enabled=False):
        exact = _results(masked, [tensor.double() for tensor in tensors])
        plain = _errors(_results(masked, tensors), exact)
        ours = _errors(_results(shared, tensors), exact)
    precision = torch.finfo(heads.dtype).eps
    slack = precision / 8 if heads.dtype in HALF else 64 * precision
    for found, usual in zip(ours, plain, strict=True):
        if not found <= FACTOR * usual + slack:
            raise RuntimeError(
                f"the attention kernel of this device is off by {found:.2g} for {heads}, where "
                f"masked attention is by {usual:.2g}"
            )


def _example(device: torch.device, heads: Heads) -> list[Tensor]:
    """Queries, keys, values and a gradient, as the views of (1, T, N, D) that layers make."""
    total = sum(prefix + sum(tails) for prefix, tails in EXAMPLE)
    generator = torch.Generator().manual_seed(0)
    counts = heads.queries, heads.keys, heads.keys, heads.queries
    sizes = heads.size, heads.size, heads.value_size, heads.value_size
    return [
        torch.randn(1, total, *shape, generator=generator).to(device, heads.dtype).transpose(1, 2)
        for shape in zip(counts, sizes, strict=True)
    ]


def _results(attention: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Output and gradients; the last tensor is the gradient of the output."""
    *inputs, upstream = (tensor.detach() for tensor in tensors)
    for tensor in inputs:
        tensor.requires_grad_()
    with torch.enable_grad():
        output = attention(*inputs)
        return [output.detach(), *torch.autograd.grad(output, inputs, upstream)]


def _errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Relative differences."""
    pairs = zip(found, exact, strict=True)
    return [float((one - other).norm() / other.norm()) for one, other in pairs]
