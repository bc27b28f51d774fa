"""Log-probabilities and entropies from hidden states, without holding all logits.

Logits exist one tile (tokens x vocabulary entries) at a time and are recomputed in the backward
pass. The outer loop runs over the vocabulary and the inner one over tokens, so the gradient of a
tile of the weight is complete, in float32, before it is rounded once to the weight's dtype, which
keeps it accurate for bfloat16 weights. Statistics follow the online softmax of arXiv 1805.02867.

Shapes: M tokens, H hidden, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .in_place import adds_in_place, grad_of
from .logprobs import logit_gradient

# Measured on a CPU by `make bench-head`: smaller tiles are slower, larger ones are not faster.
CHUNK_ON_CPU = 2**20
# Not measured: tiles of 1,024 tokens x 32K entries, whose sums take 0.5 GB at 4,096 hidden units.
CHUNK_ON_ACCELERATOR = 2**25
TOKENS_IN_TILE = 1024
PRODUCT_ELEMENTS = 2**24  # entries of a half-precision product that is added to float32 sums


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to the product of hidden states and output weights.

    logits = softcap * tanh(scale * z / softcap) / temperature; no tanh without `softcap`.
    """

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be greater than 0, got {self.temperature}.")

    def forward(self, products: Tensor) -> Tensor:
        """Turn products into logits, in place."""
        if self.scale != 1.0:
            products.mul_(self.scale)
        if self.softcap is not None:
            capped = products.div_(self.softcap).tanh_()
            # The gradient of tanh reads its result.
            multiply = capped.mul if capped.requires_grad else capped.mul_
            products = multiply(self.softcap)
        return products.div_(self.temperature) if self.temperature != 1.0 else products

    def backward(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient of the logits into that of the products, in place."""
        if self.softcap is not None:
            capped = logits * (self.temperature / self.softcap)
            grad.mul_(capped.square_().neg_().add_(1.0))
        factor = self.scale / self.temperature
        return grad.mul_(factor) if factor != 1.0 else grad


@dataclass(frozen=True)
class _Tile:
    rows: slice
    entries: slice  # of the vocabulary
    hidden: Tensor
    weight: Tensor
    logits: Tensor  # in float32 at least


@dataclass(frozen=True)
class Tiling:
    """How logits are computed."""

    transform: LogitTransform = LogitTransform()
    chunk: int | None = None  # logits held at once. None: a measured default for the device
    dtype: torch.dtype | None = None  # of the matrix products. None: that of the weight
    # Add gradients of weight and bias to their `.grad` tile by tile, if nothing prevents it. Only
    # for `backward()`: `torch.autograd.grad` would return None for them.
    in_place: bool = False

    def walk(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[_Tile]:
        """Compute all tiles in turn; tiles of the same vocabulary entries are consecutive."""
        dtype = self.dtype or weight.dtype
        chunk = default_chunk(weight.device) if self.chunk is None else self.chunk
        cast = hidden.to(dtype)
        tokens, size = tile_shape(chunk, len(hidden))
        for entries in _slices(len(weight), size):
            tile_weight = weight[entries].to(dtype)
            tile_bias = None if bias is None else bias[entries].to(dtype)
            for rows in _slices(len(hidden), tokens):
                tile_hidden = cast[rows]
                if tile_bias is None:
                    products = tile_hidden @ tile_weight.t()
                else:
                    products = torch.addmm(tile_bias, tile_hidden, tile_weight.t())
                logits = products.to(torch.promote_types(dtype, torch.float32))
                del products  # frees memory before the next tile
                logits = self.transform.forward(logits)
                yield _Tile(rows, entries, tile_hidden, tile_weight, logits)


def _slices(count: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    tiling: Tiling = Tiling(),
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probability of each id under softmax(transform(hidden @ weight.T + bias)).

    `hidden`, `weight` and `bias` are (M, H), (V, H) and (V,), `ids` (M,) in [0, V). Returns
    log-probabilities (M,), entropies (M,) in nats, and whether each id is the top prediction (M,);
    the last two are None unless `with_entropy`. Results are float32 (float64 for float64 products)
    and differentiable once. A chunk below 1 raises a ValueError.
    """
    if tiling.chunk is not None and tiling.chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {tiling.chunk}.")
    # All casts to the dtype of the products are explicit.
    with torch.autocast(hidden.device.type, enabled=False):
        logps, entropies, hits = _LinearLogProbs.apply(
            tiling, with_entropy, ids, hidden, weight, bias
        )
    return logps, entropies, hits


def tile_shape(chunk: int, tokens: int) -> tuple[int, int]:
    """Tokens and vocabulary entries of a tile of at most `chunk` logits, for `tokens` in total."""
    entries = max(64, chunk // max(1, min(TOKENS_IN_TILE, tokens)))
    return max(1, min(TOKENS_IN_TILE, chunk // 64)), entries


def default_chunk(device: torch.device) -> int:
    return CHUNK_ON_CPU if device.type == "cpu" else CHUNK_ON_ACCELERATOR


class _RunningStatistics:
    """Log-normalizer over the vocabulary so far and, `with_entropy`, mean and largest logit."""

    def __init__(self, like: Tensor, with_entropy: bool):
        self.normalizer = torch.full_like(like, -torch.inf)
        self.mean = torch.zeros_like(like) if with_entropy else None
        self.top = torch.full_like(like, -torch.inf)

    def add(self, rows: slice, logits: Tensor) -> None:
        """Add the logits of a tile, which are overwritten."""
        before = self.normalizer[rows]
        top = logits.amax(1)
        largest = torch.maximum(before, top)
        # In rows whose logits are all -inf so far, any finite shift keeps exp(-inf) = 0.
        shift = largest.masked_fill(largest == -torch.inf, 0.0)
        if self.mean is None:
            total = logits.sub_(shift[:, None]).exp_().sum(1)
        else:
            weights = (logits - shift[:, None]).exp_()
            total = weights.sum(1)
            finite = logits.clamp_(min=torch.finfo(logits.dtype).min)
            weighted = weights.mul_(finite).sum(1)
        after = ((before - shift).exp() + total).log() + shift
        if self.mean is not None:
            # As above: in rows whose logits are all -inf so far, the mean stays 0.
            finite_after = after.masked_fill(after == -torch.inf, 0.0)
            rescaled = (before - finite_after).exp() * self.mean[rows]
            self.mean[rows] = rescaled + weighted * (shift - finite_after).exp()
            self.top[rows] = torch.maximum(self.top[rows], top)
        self.normalizer[rows] = after


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, tiling: Tiling, with_entropy: bool, ids: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        hidden, weight, bias = inputs
        wide = torch.promote_types(tiling.dtype or weight.dtype, torch.float32)
        chosen = hidden.new_zeros(len(hidden), dtype=wide)
        running = _RunningStatistics(chosen, with_entropy)
        for tile in tiling.walk(hidden, weight, bias):
            column, is_inside = _columns_in_tile(ids[tile.rows], tile.entries)
            logits = tile.logits.gather(1, column).squeeze(1)
            chosen[tile.rows] = torch.where(is_inside, logits, chosen[tile.rows])
            running.add(tile.rows, tile.logits)
        entropies = None if running.mean is None else running.normalizer - running.mean
        hits = None if running.mean is None else chosen >= running.top
        ctx.save_for_backward(hidden, weight, bias, ids, running.normalizer, entropies)
        ctx.tiling = tiling
        # A saved tensor may be unpacked as another tensor object, whose `.grad` nobody reads.
        ctx.leaves = (weight, bias) if tiling.in_place else (None, None)
        ctx.set_materialize_grads(False)
        return chosen - running.normalizer, entropies, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, normalizer, entropies = ctx.saved_tensors
        wide = normalizer.dtype
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[3:]
        grad_hidden = torch.zeros_like(hidden, dtype=wide) if needs_hidden else None
        grad_weight = _GradientSum(weight, ctx.leaves[0], wide) if needs_weight else None
        grad_bias = _GradientSum(bias, ctx.leaves[1], wide) if needs_bias else None
        for tile in ctx.tiling.walk(hidden, weight, bias):
            grad = _tile_gradient(tile, ids, normalizer, entropies, grads)
            grad = ctx.tiling.transform.backward(grad, tile.logits)
            if grad_bias is not None:
                grad_bias.at(tile.entries).add_(grad.sum(0))
            grad = grad.to(tile.hidden.dtype)
            if grad_hidden is not None:
                _add_product(grad_hidden[tile.rows], grad, tile.weight)
            if grad_weight is not None:
                _add_product(grad_weight.at(tile.entries), grad.t(), tile.hidden)
            del grad  # frees memory before the next tile
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return None, None, None, grad_hidden, _result(grad_weight), _result(grad_bias)


def _tile_gradient(
    tile: _Tile,
    ids: Tensor,
    normalizer: Tensor,
    entropies: Tensor | None,
    grads: Sequence[Tensor | None],
) -> Tensor:
    """The gradient (m, v) of the logits of a tile."""
    rows = tile.rows
    upstream = tuple(None if grad is None else grad[rows] for grad in grads[:2])
    entropy = None if entropies is None else entropies[rows]
    gradient = logit_gradient(tile.logits, normalizer[rows], entropy, upstream)
    if upstream[0] is not None:
        column, is_inside = _columns_in_tile(ids[rows], tile.entries)
        gradient.scatter_add_(1, column, (upstream[0] * is_inside)[:, None])
    return gradient


class _GradientSum:
    """The gradient of a weight or bias, summed over all tokens, one vocabulary tile at a time.

    Each tile is summed in float32 and rounded once. The sum goes into `.grad` of a leaf that allows
    it, otherwise into a new matrix.
    """

    def __init__(self, parameter: Tensor, leaf: Tensor | None, wide: torch.dtype):
        self.is_returned = leaf is None or not adds_in_place(leaf)  # to autograd
        self.whole = torch.zeros_like(parameter) if self.is_returned else grad_of(leaf)
        self._wide = wide
        self._entries = slice(0, 0)
        self._tile = self.whole[self._entries]

    def at(self, entries: slice) -> Tensor:
        """Return the float32 sum of a tile, to add to; a view of the whole if that is float32."""
        if entries != self._entries:
            self.store()
            self._entries = entries
            self._tile = self.whole[entries]
            if self._tile.dtype != self._wide:
                self._tile = torch.zeros_like(self._tile, dtype=self._wide)
        return self._tile

    def store(self) -> None:
        """Add the sum of the last tile to the whole."""
        if self._tile.dtype != self.whole.dtype:
            self.whole[self._entries] += self._tile


def _result(total: _GradientSum | None) -> Tensor | None:
    """Return the gradient, or None if it was added in place or is not needed."""
    if total is None:
        return None
    total.store()
    return total.whole if total.is_returned else None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to a total of the same or a wider dtype, in place."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
        return
    # The product takes memory of its own before it is added, so a block of rows is added at a time.
    step = max(1, PRODUCT_ELEMENTS // right.shape[1])
    for start in range(0, len(left), step):
        rows = slice(start, start + step)
        total[rows] += left[rows] @ right


def _columns_in_tile(ids: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
    """Return the column (M, 1) of each id in a tile, clamped, and whether it is inside (M,)."""
    column = ids - entries.start
    width = entries.stop - entries.start
    is_inside = (column >= 0) & (column < width)
    return column.clamp(0, width - 1)[:, None], is_inside
