"""Attention kernels that also return the log-normalizer, so that their results can be merged.

Attention over the union of two sets of keys is the average of the attentions over each set,
weighted by their normalizers. The backward pass over one set needs only the output and the
normalizer of the union (ring attention, arXiv 2310.01889). So a query can attend to keys in
separate tensors without a mask and without concatenating them. Where N > K, only the
memory-efficient kernel copies each key head for all query heads that share it, in every call.

Shapes: B rows, N query heads, K key heads (N is a multiple of K), Q queries, S keys, D head size.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.functional import pad

aten = torch.ops.aten
# Entries of two outputs that are merged at once, in float32.
MERGED_ON_CPU = 2**18
MERGED_ON_ACCELERATOR = 2**24


Tensors = tuple[Tensor, ...]


class CpuFlash:
    """The kernel behind `scaled_dot_product_attention` on CPUs; every floating dtype."""

    def forward(self, qkv: Tensors, causal: bool, scale: float) -> Tensors:
        """Attend by (query, key, value): output (B, N, Q, D), log-normalizer (B, N, Q)."""
        attend = aten._scaled_dot_product_flash_attention_for_cpu
        results: Tensors = attend(*qkv, 0.0, causal, scale=scale)
        return results

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], causal: bool, scale: float
    ) -> Tensors:
        """Gradients of query, key and value; `saved` is (query, key, value, output, normalizer)."""
        attend_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients: Tensors = attend_backward(grad, *saved, 0.0, causal, scale=scale)
        return gradients


class CudaFlash:
    """FlashAttention 2 as shipped with torch: half precision, head sizes in multiples of 8.

    It reads shared key heads without copying them, and sums their gradients itself
    (`mha_fwd` and `mha_bwd` in torch's `flash_api.h`).
    """

    def forward(self, qkv: Tensors, causal: bool, scale: float) -> Tensors:
        """See `CpuFlash`."""
        results = aten._scaled_dot_product_flash_attention(*qkv, 0.0, causal, scale=scale)
        return results[0], results[1]

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], causal: bool, scale: float
    ) -> Tensors:
        """See `CpuFlash`."""
        query, key, value, output, normalizer = saved
        seed = torch.zeros((), dtype=torch.int64, device=grad.device)
        gradients: Tensors = aten._scaled_dot_product_flash_attention_backward(
            grad,
            query,
            key,
            value,
            output,
            normalizer.contiguous(),
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=query.shape[2],
            max_k=key.shape[2],
            dropout_p=0.0,
            is_causal=causal,
            philox_seed=seed,
            philox_offset=seed,
            scale=scale,
        )
        return gradients


class CudaEfficient:
    """The memory-efficient kernel of torch (arXiv 2112.05682): float32 too, and older GPUs.

    It needs as many key heads as query heads, so shared key heads are copied.
    """

    ALIGNMENT = 32  # its backward pass reads normalizers in blocks of this many queries

    def forward(self, qkv: Tensors, causal: bool, scale: float) -> Tensors:
        """See `CpuFlash`."""
        results = aten._scaled_dot_product_efficient_attention(
            *expanded(qkv),
            attn_bias=None,
            compute_log_sumexp=True,
            dropout_p=0.0,
            is_causal=causal,
            scale=scale,
        )
        return results[0], results[1][..., : qkv[0].shape[2]]

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], causal: bool, scale: float
    ) -> Tensors:
        """See `CpuFlash`."""
        query, key, value, output, normalizer = saved
        seed = torch.zeros((), dtype=torch.int64, device=query.device)
        missing = -normalizer.shape[2] % self.ALIGNMENT
        normalizer = pad(normalizer, (0, missing), value=torch.inf)
        gradients = aten._scaled_dot_product_efficient_attention_backward(
            grad,
            *expanded((query, key, value)),
            attn_bias=None,
            out=output,
            logsumexp=normalizer.contiguous(),
            philox_seed=seed,
            philox_offset=seed,
            dropout_p=0.0,
            grad_input_mask=[True, True, True, False],
            is_causal=causal,
            scale=scale,
        )
        return gradients[0], merge_heads(gradients[1], key), merge_heads(gradients[2], value)


class Tiles:
    """Attention with logits softcapped at `cap`, computed in tiles, on any device.

    The cap is applied before the softmax, so it cannot be added to the result of another kernel.
    """

    SIZE = 256  # queries, and keys, of a tile

    def __init__(self, cap: float):
        self._cap = cap

    def forward(self, qkv: Tensors, causal: bool, scale: float) -> Tensors:
        """See `CpuFlash`."""
        query, key, value = expanded(qkv)
        dtype = torch.promote_types(query.dtype, torch.float32)
        output = query.new_empty(*query.shape[:3], value.shape[3])
        normalizer = query.new_empty(query.shape[:3], dtype=dtype)
        for rows, columns in self._tiles(query, key, causal):
            logits = self._logits(query, key, (rows, columns), causal, scale)
            sums = logits.logsumexp(-1)
            weights = (logits - sums[..., None]).exp().to(value.dtype)
            tile = weights @ value[:, :, columns], sums
            if columns.start:
                tile = merge((output[:, :, rows], normalizer[:, :, rows]), tile)
            output[:, :, rows], normalizer[:, :, rows] = tile
        return output, normalizer

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], causal: bool, scale: float
    ) -> Tensors:
        """See `CpuFlash`."""
        query, key, value = expanded(saved[:3])
        output, normalizer = saved[3:]
        grad_query = torch.zeros_like(query)
        grad_key = torch.zeros_like(key)
        grad_value = torch.zeros_like(value)
        mean = (grad * output).sum(-1, keepdim=True, dtype=normalizer.dtype)
        for rows, columns in self._tiles(query, key, causal):
            upstream = grad[:, :, rows]
            logits = self._logits(query, key, (rows, columns), causal, scale)
            weights = (logits - normalizer[:, :, rows, None]).exp()
            slope = (1 - (logits / self._cap) ** 2) * scale
            grad_weights = (upstream @ value[:, :, columns].transpose(2, 3)).to(weights.dtype)
            grad_logits = weights * (grad_weights - mean[:, :, rows])
            # At masked keys the logit is infinite, and so is the slope: 0 times inf would be NaN.
            grad_logits = (grad_logits * slope).masked_fill(weights == 0, 0).to(query.dtype)
            grad_query[:, :, rows] += grad_logits @ key[:, :, columns]
            grad_key[:, :, columns] += grad_logits.transpose(2, 3) @ query[:, :, rows]
            grad_value[:, :, columns] += weights.to(grad.dtype).transpose(2, 3) @ upstream
        return grad_query, merge_heads(grad_key, saved[1]), merge_heads(grad_value, saved[2])

    def _tiles(self, query: Tensor, key: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
        for start in range(0, query.shape[2], self.SIZE):
            rows = slice(start, min(start + self.SIZE, query.shape[2]))
            last = min(key.shape[2], rows.stop) if causal else key.shape[2]
            for column in range(0, last, self.SIZE):
                yield rows, slice(column, min(column + self.SIZE, last))

    def _logits(
        self, query: Tensor, key: Tensor, tile: tuple[slice, slice], causal: bool, scale: float
    ) -> Tensor:
        rows, columns = tile
        logits = query[:, :, rows] @ key[:, :, columns].transpose(2, 3)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
        logits = (logits / self._cap).tanh_() * self._cap
        if causal and columns.stop > rows.start:
            seen = torch.ones(logits.shape[2:], dtype=torch.bool, device=logits.device)
            logits.masked_fill_(~seen.tril_(rows.start - columns.start), -torch.inf)
        return logits


Kernel = CpuFlash | CudaFlash | CudaEfficient | Tiles
_CPU = CpuFlash()


def choose_kernel(query: Tensor, cap: float | None = None) -> Kernel:
    """Choose the kernel for a query on its device, with logits softcapped at `cap` if it is set.

    Raises NotImplementedError if torch has no kernel for the device, dtype or head size.
    """
    if cap is not None:
        return Tiles(cap)
    if query.device.type == "cpu":
        return _CPU
    if query.device.type != "cuda":
        raise NotImplementedError(f"No attention kernel for devices of type {query.device.type}.")
    return _kernel_of_gpu(query.device, query.dtype, query.shape[-1])


@cache
def _kernel_of_gpu(device: torch.device, dtype: torch.dtype, size: int) -> Kernel:
    # On some GPUs a kernel has no backward pass: torch checks that only while gradients are on.
    with torch.enable_grad():
        example = torch.empty(1, 1, 8, size, dtype=dtype, device=device, requires_grad=True)
        params = SDPAParams(example, example, example, None, 0.0, False, False)
        # torch relies on `scaled_dot_product_attention` to pad heads for this kernel.
        if size % 8 == 0 and can_use_flash_attention(params):
            return CudaFlash()
        if can_use_efficient_attention(params):
            return CudaEfficient()
    name = torch.cuda.get_device_name(device)
    raise NotImplementedError(f"{name} has no attention kernel for {dtype} heads of size {size}.")


def same_size(*heads: Tensor) -> list[Tensor]:
    """Pad heads (..., D) to one size D with zeros, as kernels need; the products do not change."""
    size = max(x.shape[-1] for x in heads)
    return [x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in heads]


def expanded(qkv: Tensors) -> list[Tensor]:
    """Repeat each of K heads (B, K, S, D) for the query heads that share it: (B, N, S, D)."""
    repeats = [qkv[0].shape[1] // heads.shape[1] for heads in qkv]
    pairs = zip(qkv, repeats, strict=True)
    return [x if n == 1 else x.repeat_interleave(n, 1) for x, n in pairs]


def merge_heads(grad: Tensor, keys: Tensor) -> Tensor:
    """Sum gradients (B, N, S, D) over the query heads that share a head of `keys`: (B, K, S, D)."""
    if grad.shape[1] == keys.shape[1]:
        return grad
    return grad.unflatten(1, (keys.shape[1], -1)).sum(2)


def apply_attention_sink(output: Tensor, normalizer: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Add to an attention one more key, with value 0 and logits `sink` (N,): output, normalizer."""
    total = torch.logaddexp(normalizer, sink[:, None].to(normalizer.dtype))
    return (output * (normalizer - total).exp()[..., None]).to(output.dtype), total


def attention_sink_backward(
    grad: Tensor, output: Tensor, normalizer: Tensor, sink: Tensor
) -> Tensor:
    """The gradient (N,) of `sink`, from what `apply_attention_sink` returned."""
    share = (sink[:, None].to(normalizer.dtype) - normalizer).exp()
    lost = (grad * output).sum(-1, dtype=normalizer.dtype) * share
    return -lost.sum((0, 2)).to(sink.dtype)


def merge(first: Tensors, second: Tensors) -> Tensors:
    """Merge attentions over two disjoint sets of keys, each (output, log-normalizer)."""
    total = torch.logaddexp(first[1], second[1])
    output = torch.empty_like(first[0])
    batch, heads, length, width = output.shape
    most = MERGED_ON_CPU if output.device.type == "cpu" else MERGED_ON_ACCELERATOR
    step = max(1, most // max(1, batch * heads * width))
    for start in range(0, length, step):
        rows = slice(start, start + step)
        # The weights are float32, so the products are too: only their sum is rounded.
        weighted_first, weighted_second = (
            attended[:, :, rows] * (normalizer[:, :, rows] - total[:, :, rows]).exp()[..., None]
            for attended, normalizer in (first, second)
        )
        output[:, :, rows] = weighted_first.add_(weighted_second)
    return output, total


# --- The check of a kernel, on a small example ---

# (queries, keys, causal): longer than the blocks of 32 and 64 tokens that kernels work in.
EXAMPLES = ((70, 70, True), (43, 70, False))
FACTOR = 3.0  # allowed error, as a multiple of that of rounding the results once
HALF = (torch.float16, torch.bfloat16)


class Heads(NamedTuple):
    """Device, dtype and shape of the attention heads of a layer."""

    device: torch.device
    dtype: torch.dtype
    queries: int  # query heads N
    keys: int  # key heads K
    size: int  # head size D


@cache
@torch.no_grad()
def check_kernel(kernel: Kernel, heads: Heads) -> None:
    """Compare a kernel, once, with plain attention; RuntimeError if more than rounding differs."""
    scale = heads.size**-0.5
    precision = torch.finfo(heads.dtype).eps
    slack = precision if heads.dtype in HALF else 64 * precision
    for queries, keys, causal in EXAMPLES:
        # A gradient, queries, keys and values, as the views of (B, T, N, D) that layers make.
        generator = torch.Generator().manual_seed(0)
        query_shape = (queries, heads.queries)
        key_shape = (keys, heads.keys)
        grad, *qkv = (
            torch.randn(2, *shape, heads.size, generator=generator)
            .to(heads.device, heads.dtype)
            .transpose(1, 2)
            for shape in (query_shape, query_shape, key_shape, key_shape)
        )
        with torch.autocast(heads.device.type, enabled=False):
            exact = _plain_attention([x.double() for x in (grad, *qkv)], causal, scale)
            wide = torch.promote_types(heads.dtype, torch.float32)
            plain = _plain_attention([x.to(wide) for x in (grad, *qkv)], causal, scale)
            results = kernel.forward(tuple(qkv), causal, scale)
            results += kernel.backward(grad, (*qkv, *results), causal, scale)
        for result, reference, expected in zip(results, plain, exact, strict=True):
            error = _relative_error(result, expected)
            rounding = _relative_error(reference.to(heads.dtype), expected)
            if not error <= FACTOR * rounding + slack:
                dtype = str(heads.dtype).removeprefix("torch.")
                raise RuntimeError(
                    f"the attention kernel of this device is off by {error:.2g} for "
                    f"{heads.queries} query and {heads.keys} key heads of size {heads.size} in "
                    f"{dtype}, where rounding explains {rounding:.2g}"
                )


def _relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).norm() / expected.norm())


def _plain_attention(tensors: Sequence[Tensor], causal: bool, scale: float) -> Tensors:
    """Attend without a kernel: output, log-normalizer, gradients of query, key and value.

    `tensors` are the gradient of the output, the query, the key and the value.
    """
    grad, *qkv = (x.detach().requires_grad_() for x in tensors)
    with torch.enable_grad():
        query, key, value = expanded(tuple(qkv))
        logits = query @ key.mT * scale
        if causal:
            logits = logits + torch.full_like(logits, -torch.inf).triu(1)
        output = logits.softmax(-1) @ value
    return output, logits.logsumexp(-1), *torch.autograd.grad(output, qkv, grad)
