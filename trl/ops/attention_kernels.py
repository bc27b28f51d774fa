"""Attention kernels that also return the log-normalizer, so that their results can be merged.

Attention over the union of two sets of keys is the average of the attentions over each, weighted by
their normalizers; and the backward pass of one part needs only the output and the normalizer of the
union (ring attention, arXiv 2310.01889). So a query attends to keys in different places without a
mask, and without keys being brought together. Where N > K, only the memory-efficient kernel needs
copies: of each key head for all query heads that share it, in every call.

Shapes: B rows, N query heads, K key heads (N is a multiple of K), Q queries, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_efficient_attention,
    can_use_flash_attention,
)

aten = torch.ops.aten
# Entries of two parts that are merged at once, in float32.
MERGED_ON_CPU = 2**18
MERGED_ON_ACCELERATOR = 2**24


class Kernel:
    """One attention kernel."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend to (B, K, S, D): output (B, N, Q, D) and log-normalizer (B, N, Q)."""
        raise NotImplementedError

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value; `saved` is (query, key, value, output, normalizer)."""
        raise NotImplementedError


class CpuFlash(Kernel):
    """The kernel behind `scaled_dot_product_attention` on CPUs; every floating dtype."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *saved, 0.0, causal, scale=scale
        )


class CudaFlash(Kernel):
    """FlashAttention 2 as shipped with torch: half precision, head sizes in multiples of 8.

    It takes fewer key heads than query heads as they are, and sums their gradients itself
    (`mha_fwd` and `mha_bwd` in torch's `flash_api.h`).
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        found = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, scale=scale
        )
        return found[0], found[1]

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        query, key, value, output, normalizer = saved
        seed = torch.zeros((), dtype=torch.int64, device=query.device)
        return aten._scaled_dot_product_flash_attention_backward(
            grad,
            query,
            key,
            value,
            output,
            normalizer.contiguous(),
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            seed,
            seed,
            scale=scale,
        )


class CudaEfficient(Kernel):
    """The memory-efficient kernel of torch (arXiv 2112.05682): float32 too, and older GPUs.

    It wants as many key heads as query heads, so key heads that are shared are copied.
    """

    ALIGNMENT = 32  # its backward pass reads normalizers in blocks of this many queries

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        key, value = expand_heads(key, query), expand_heads(value, query)
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
        return found[0], found[1][..., : query.shape[2]]

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        query, key, value, output, normalizer = saved
        seed = torch.zeros((), dtype=torch.int64, device=query.device)
        missing = -normalizer.shape[2] % self.ALIGNMENT
        normalizer = torch.nn.functional.pad(normalizer, (0, missing), value=torch.inf)
        found = aten._scaled_dot_product_efficient_attention_backward(
            grad,
            query,
            expand_heads(key, query),
            expand_heads(value, query),
            None,
            output,
            normalizer.contiguous(),
            seed,
            seed,
            0.0,
            [True, True, True, False],
            causal,
            scale=scale,
        )
        return found[0], merge_heads(found[1], key), merge_heads(found[2], value)


_CPU = CpuFlash()


def choose_kernel(query: Tensor) -> Kernel:
    """The kernel for the device, dtype and head size of `query`.

    Raises:
        NotImplementedError: if torch has none for them.
    """
    if query.device.type == "cpu":
        return _CPU
    if query.device.type != "cuda":
        raise NotImplementedError(f"No attention kernel for devices of type {query.device.type}.")
    return _kernel_of_gpu(query.device, query.dtype, query.shape[-1])


@cache
def _kernel_of_gpu(device: torch.device, dtype: torch.dtype, size: int) -> Kernel:
    questions = (can_use_flash_attention, can_use_efficient_attention)
    kernel = gpu_kernel(size, *supported(device, dtype, size, questions))
    if kernel is None:
        name = torch.cuda.get_device_name(device)
        raise NotImplementedError(f"No attention kernel for heads of size {size}, {dtype}, {name}.")
    return kernel


def supported(
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    questions: Iterable[Callable[[SDPAParams], bool]],
) -> list[bool]:
    """What torch answers about attention over heads of `size` entries, with gradients.

    Args:
        questions: functions of `torch.backends.cuda`.
    """
    # Some GPUs have a forward pass only, and torch looks at whether gradients are recorded.
    with torch.enable_grad():
        example = torch.empty(1, 1, 8, size, dtype=dtype, device=device, requires_grad=True)
        facts = SDPAParams(example, example, example, None, 0.0, False, False)
        return [question(facts) for question in questions]


def gpu_kernel(size: int, flash: bool, efficient: bool) -> Kernel | None:
    """The kernel for a GPU, a dtype and heads of `size` entries; None if there is none.

    Args:
        flash, efficient (`bool`): whether torch says that a kernel supports them.
    """
    # torch counts on `scaled_dot_product_attention` to pad heads for this kernel.
    if flash and size % 8 == 0:
        return CudaFlash()
    return CudaEfficient() if efficient else None


def expand_heads(keys: Tensor, query: Tensor) -> Tensor:
    """Repeat each of K heads (B, K, S, D) for the query heads that share it: (B, N, S, D)."""
    repeats = query.shape[1] // keys.shape[1]
    return keys if repeats == 1 else keys.repeat_interleave(repeats, 1)


def merge_heads(grad: Tensor, keys: Tensor) -> Tensor:
    """Sum gradients (B, N, S, D) over the query heads that share a head of `keys`: (B, K, S, D)."""
    if grad.shape[1] == keys.shape[1]:
        return grad
    return grad.unflatten(1, (keys.shape[1], -1)).sum(2)


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attentions over two disjoint sets of keys, each (output, log-normalizer)."""
    total = torch.logaddexp(first[1], second[1])
    output = torch.empty_like(first[0])
    batch, heads, length, width = output.shape
    most = MERGED_ON_CPU if output.device.type == "cpu" else MERGED_ON_ACCELERATOR
    step = max(1, most // max(1, batch * heads * width))
    for start in range(0, length, step):
        at = slice(start, start + step)
        # Weights are not rounded to half precision, nor the parts before they are added.
        one, other = (
            part[:, :, at] * (normalizer[:, :, at] - total[:, :, at]).exp()[..., None]
            for part, normalizer in (first, second)
        )
        output[:, :, at] = one.add_(other)
    return output, total
