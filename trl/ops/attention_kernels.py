"""Attention kernels that also return the log-normalizer, so that their results can be merged.

Attention over the union of two sets of keys is the average of the attentions over each, weighted by
their normalizers; and the backward pass of one part needs only the output and the normalizer of the
union (ring attention, arXiv 2310.01889). So a query attends to keys in different places without a
mask, and without keys being brought together. Where N > K, only the memory-efficient kernel needs
copies: of each key head for all query heads that share it, in every call.

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
# Entries of two parts that are merged at once, in float32.
MERGED_ON_CPU = 2**18
MERGED_ON_ACCELERATOR = 2**24


Tensors = tuple[Tensor, ...]


class CpuFlash:
    """The kernel behind `scaled_dot_product_attention` on CPUs; every floating dtype."""

    def forward(self, part: Tensors, causal: bool, scale: float) -> Tensors:
        """Attend by (query, key, value): output (B, N, Q, D), log-normalizer (B, N, Q)."""
        attend = aten._scaled_dot_product_flash_attention_for_cpu
        return attend(*part, 0.0, causal, scale=scale)

    def backward(self, grad: Tensor, saved: Tensors, causal: bool, scale: float) -> Tensors:
        """Gradients of query, key and value; `saved` is (query, key, value, output, normalizer)."""
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return gradients(grad, *saved, 0.0, causal, scale=scale)


class CudaFlash:
    """FlashAttention 2 as shipped with torch: half precision, head sizes in multiples of 8.

    It reads shared key heads without copying them, and sums their gradients itself
    (`mha_fwd` and `mha_bwd` in torch's `flash_api.h`).
    """

    def forward(self, part: Tensors, causal: bool, scale: float) -> Tensors:
        """See `CpuFlash`."""
        results = aten._scaled_dot_product_flash_attention(*part, 0.0, causal, scale=scale)
        return results[0], results[1]

    def backward(self, grad: Tensor, saved: Tensors, causal: bool, scale: float) -> Tensors:
        """See `CpuFlash`."""
        *tensors, normalizer = saved
        seed = torch.zeros((), dtype=torch.int64, device=grad.device)
        lengths = saved[0].shape[2], saved[1].shape[2]
        rest = None, None, *lengths, 0.0, causal, seed, seed
        return aten._scaled_dot_product_flash_attention_backward(
            grad, *tensors, normalizer.contiguous(), *rest, scale=scale
        )


class CudaEfficient:
    """The memory-efficient kernel of torch (arXiv 2112.05682): float32 too, and older GPUs.

    It needs as many key heads as query heads, so shared key heads are copied.
    """

    ALIGNMENT = 32  # its backward pass reads normalizers in blocks of this many queries

    def forward(self, part: Tensors, causal: bool, scale: float) -> Tensors:
        """See `CpuFlash`."""
        results = aten._scaled_dot_product_efficient_attention(
            *expanded(part), None, True, 0.0, causal, scale=scale
        )
        return results[0], results[1][..., : part[0].shape[2]]

    def backward(self, grad: Tensor, saved: Tensors, causal: bool, scale: float) -> Tensors:
        """See `CpuFlash`."""
        (query, key, value), (output, normalizer) = saved[:3], saved[3:]
        seed = torch.zeros((), dtype=torch.int64, device=query.device)
        missing = -normalizer.shape[2] % self.ALIGNMENT
        normalizer = pad(normalizer, (0, missing), value=torch.inf)
        rest = seed, seed, 0.0, [True, True, True, False], causal
        gradients = aten._scaled_dot_product_efficient_attention_backward(
            grad, *expanded(saved[:3]), None, output, normalizer.contiguous(), *rest, scale=scale
        )
        return gradients[0], merge_heads(gradients[1], key), merge_heads(gradients[2], value)


class Tiles:
    """Attention with logits softcapped to stay below `cap`, computed in tiles, on any device.

    The cap comes before normalization, so results of other kernels cannot be corrected.
    """

    SIZE = 256  # queries, and keys, of a tile

    def __init__(self, cap: float):
        self._cap = cap

    def forward(self, part: Tensors, causal: bool, scale: float) -> Tensors:
        """See `CpuFlash`."""
        query, key, value = expanded(part)
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

    def backward(self, grad: Tensor, saved: Tensors, causal: bool, scale: float) -> Tensors:
        """See `CpuFlash`."""
        (query, key, value), (output, normalizer) = expanded(saved[:3]), saved[3:]
        of_query, of_key, of_value = (torch.zeros_like(x) for x in (query, key, value))
        mean = (grad * output).sum(-1, keepdim=True, dtype=normalizer.dtype)
        for rows, columns in self._tiles(query, key, causal):
            upstream, part = grad[:, :, rows], key[:, :, columns]
            logits = self._logits(query, key, (rows, columns), causal, scale)
            weights = (logits - normalizer[:, :, rows, None]).exp()
            slope = (1 - (logits / self._cap) ** 2) * scale
            of_weights = (upstream @ value[:, :, columns].transpose(2, 3)).to(weights.dtype)
            of_logits = weights * (of_weights - mean[:, :, rows])
            # Where nothing is seen the slope is that of an infinite logit.
            of_logits = (of_logits * slope).masked_fill(weights == 0, 0).to(query.dtype)
            of_query[:, :, rows] += of_logits @ part
            of_key[:, :, columns] += of_logits.transpose(2, 3) @ query[:, :, rows]
            of_value[:, :, columns] += weights.to(grad.dtype).transpose(2, 3) @ upstream
        return of_query, merge_heads(of_key, saved[1]), merge_heads(of_value, saved[2])

    def _tiles(self, query: Tensor, key: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
        for start in range(0, query.shape[2], self.SIZE):
            rows = slice(start, min(start + self.SIZE, query.shape[2]))
            last = min(key.shape[2], rows.stop) if causal else key.shape[2]
            for column in range(0, last, self.SIZE):
                yield rows, slice(column, min(column + self.SIZE, last))

    def _logits(
        self, query: Tensor, key: Tensor, at: tuple[slice, slice], causal: bool, scale: float
    ) -> Tensor:
        rows, columns = at
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
    """The kernel for a query, and for logits below `cap`; NotImplementedError if torch has none."""
    if cap is not None:
        return Tiles(cap)
    if query.device.type == "cpu":
        return _CPU
    if query.device.type != "cuda":
        raise NotImplementedError(f"No attention kernel for devices of type {query.device.type}.")
    return _kernel_of_gpu(query.device, query.dtype, query.shape[-1])


@cache
def _kernel_of_gpu(device: torch.device, dtype: torch.dtype, size: int) -> Kernel:
    # Some GPUs have a forward pass only, and torch looks at whether gradients are recorded.
    with torch.enable_grad():
        example = torch.empty(1, 1, 8, size, dtype=dtype, device=device, requires_grad=True)
        facts = SDPAParams(example, example, example, None, 0.0, False, False)
        # torch counts on `scaled_dot_product_attention` to pad heads for this kernel.
        if size % 8 == 0 and can_use_flash_attention(facts):
            return CudaFlash()
        if can_use_efficient_attention(facts):
            return CudaEfficient()
    name = torch.cuda.get_device_name(device)
    raise NotImplementedError(f"{name} has no attention kernel for {dtype} heads of size {size}.")


def same_size(*heads: Tensor) -> list[Tensor]:
    """Pad heads (..., D) with zeros, which change no product; kernels need one size for all."""
    size = max(x.shape[-1] for x in heads)
    return [x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in heads]


def expanded(part: Tensors) -> list[Tensor]:
    """Repeat each of K heads (B, K, S, D) for the query heads that share it: (B, N, S, D)."""
    repeats = [part[0].shape[1] // heads.shape[1] for heads in part]
    pairs = zip(part, repeats, strict=True)
    return [x if n == 1 else x.repeat_interleave(n, 1) for x, n in pairs]


def merge_heads(grad: Tensor, keys: Tensor) -> Tensor:
    """Sum gradients (B, N, S, D) over the query heads that share a head of `keys`: (B, K, S, D)."""
    if grad.shape[1] == keys.shape[1]:
        return grad
    return grad.unflatten(1, (keys.shape[1], -1)).sum(2)


def apply_attention_sink(output: Tensor, normalizer: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Merge an attention with one more key whose value is 0, and whose logits are `sink` (N,)."""
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
        at = slice(start, start + step)
        # Weights are not rounded to half precision, nor the parts before they are added.
        weighted_first, weighted_second = (
            part[:, :, at] * (normalizer[:, :, at] - total[:, :, at]).exp()[..., None]
            for part, normalizer in (first, second)
        )
        output[:, :, at] = weighted_first.add_(weighted_second)
    return output, total


# --- The check of a kernel, on a small example ---

# Queries and keys: longer than the blocks of 32 and 64 tokens that kernels work in.
EXAMPLES = ((70, 70, True), (43, 70, False))
FACTOR = 3.0  # times the error of rounding results once
HALF = (torch.float16, torch.bfloat16)


class Heads(NamedTuple):
    """What a layer attends with."""

    device: torch.device
    dtype: torch.dtype
    queries: int
    keys: int
    size: int


@cache
@torch.no_grad()
def check_kernel(kernel: Kernel, heads: Heads) -> None:
    """Compare a kernel, once, with plain attention; RuntimeError if more than rounding differs."""
    scale, precision = heads.size**-0.5, torch.finfo(heads.dtype).eps
    slack = precision if heads.dtype in HALF else 64 * precision
    for queries, keys, causal in EXAMPLES:
        # A gradient, queries, keys and values, as the views of (B, T, N, D) that layers make.
        generator = torch.Generator().manual_seed(0)
        of_queries, of_keys = (queries, heads.queries), (keys, heads.keys)
        grad, *part = (
            torch.randn(2, *shape, heads.size, generator=generator)
            .to(heads.device, heads.dtype)
            .transpose(1, 2)
            for shape in (of_queries, of_queries, of_keys, of_keys)
        )
        with torch.autocast(heads.device.type, enabled=False):
            exact = _written_out([x.double() for x in (grad, *part)], causal, scale)
            wide = torch.promote_types(heads.dtype, torch.float32)
            plain = _written_out([x.to(wide) for x in (grad, *part)], causal, scale)
            results = kernel.forward(tuple(part), causal, scale)
            results += kernel.backward(grad, (*part, *results), causal, scale)
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


def _written_out(tensors: Sequence[Tensor], causal: bool, scale: float) -> Tensors:
    """Output, log-normalizer, and gradients of query, key and value.

    `tensors` are the gradient of the output, the query, the key and the value.
    """
    grad, *part = (x.detach().requires_grad_() for x in tensors)
    with torch.enable_grad():
        query, key, value = expanded(tuple(part))
        logits = query @ key.mT * scale
        if causal:
            logits = logits + torch.full_like(logits, -torch.inf).triu(1)
        output = logits.softmax(-1) @ value
    return output, logits.logsumexp(-1), *torch.autograd.grad(output, part, grad)
