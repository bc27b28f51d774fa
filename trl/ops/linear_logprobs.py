"""Log-probabilities and entropies from hidden states, without ever holding their logits.

Logits exist one tile (tokens x vocabulary entries) at a time and are computed again in the backward
pass. Tiles run over the vocabulary outside and over the tokens inside, so the gradient of a tile of
the weight is complete, in float32, before it is rounded to the weight's dtype: nothing drifts when
the weights are bfloat16. Statistics follow the online softmax of arXiv 1805.02867.

Shapes: M tokens, H hidden, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .in_place import adds_in_place, grad_of
from .logprobs import logit_gradient

# Measured on a CPU by `make bench-head`: smaller tiles lose time to calls, larger ones gain none.
CHUNK_ON_CPU = 2**20
# Not measured: tiles of 1,024 tokens x 32K entries, whose sums take 0.5 GB at 4,096 hidden units.
CHUNK_ON_ACCELERATOR = 2**25
TOKENS_IN_TILE = 1024
PRODUCT_ELEMENTS = 2**24  # of a narrow product that is added to wider sums


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
            products = (capped.mul if capped.requires_grad else capped.mul_)(self.softcap)
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
    # Add gradients of weight and bias to their `.grad` tile by tile, if that may be; only for
    # `backward()`, whose result is read there.
    in_place: bool = False

    def walk(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[_Tile]:
        """Compute all tiles one after the other; those of the same vocabulary entries in a row."""
        dtype = self.dtype or weight.dtype
        chunk = default_chunk(weight.device) if self.chunk is None else self.chunk
        cast = hidden.to(dtype)
        tokens, size = tile_shape(chunk, len(hidden))
        for entries in _slices(len(weight), size):
            part = weight[entries].to(dtype)
            shift = None if bias is None else bias[entries].to(dtype)
            for rows in _slices(len(hidden), tokens):
                left = cast[rows]
                products = left @ part.t() if shift is None else torch.addmm(shift, left, part.t())
                logits = products.to(torch.promote_types(dtype, torch.float32))
                del products  # frees memory before the next tile
                yield _Tile(rows, entries, left, part, self.transform.forward(logits))


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

    `hidden`, `weight` and `bias` are (M, H), (V, H) and (V,), `ids` (M,) in [0, V). Returned are
    log-probabilities (M,) and, `with_entropy`, entropies in nats and whether each id is the
    likeliest, else None: in float32 (float64 for float64 products), differentiable once. A chunk
    below 1 is a ValueError.
    """
    if tiling.chunk is not None and tiling.chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {tiling.chunk}.")
    # Each cast to the dtype of the products is explicit.
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearLogProbs.apply(tiling, with_entropy, ids, hidden, weight, bias)


def tile_shape(chunk: int, tokens: int) -> tuple[int, int]:
    """Tokens and vocabulary entries of the largest tile, with `chunk` logits, of so many tokens."""
    entries = max(64, chunk // max(1, min(TOKENS_IN_TILE, tokens)))
    return max(1, min(TOKENS_IN_TILE, chunk // 64)), entries


def default_chunk(device: torch.device) -> int:
    return CHUNK_ON_CPU if device.type == "cpu" else CHUNK_ON_ACCELERATOR


class _Running:
    """Log-normalizer, and mean and largest logit if asked for, over the vocabulary seen so far."""

    def __init__(self, like: Tensor, with_entropy: bool):
        self.normalizer = torch.full_like(like, -torch.inf)
        self.mean = torch.zeros_like(like) if with_entropy else None
        self.top = torch.full_like(like, -torch.inf)

    def add(self, rows: slice, logits: Tensor) -> None:
        """Take the logits of a tile into account; they are overwritten."""
        before = self.normalizer[rows]
        top = logits.amax(1)
        largest = torch.maximum(before, top)
        # Rows whose logits are all -inf so far: any finite shift keeps them at exp(-inf) = 0.
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
            # As above: the mean of none but impossible logits stays 0.
            reached = after.masked_fill(after == -torch.inf, 0.0)
            decayed = (before - reached).exp() * self.mean[rows]
            self.mean[rows] = decayed + weighted * (shift - reached).exp()
            self.top[rows] = torch.maximum(self.top[rows], top)
        self.normalizer[rows] = after


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tiling: Tiling, with_entropy: bool, ids: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        hidden, weight, bias = inputs
        wide = torch.promote_types(tiling.dtype or weight.dtype, torch.float32)
        chosen = hidden.new_zeros(len(hidden), dtype=wide)
        running = _Running(chosen, with_entropy)
        for tile in tiling.walk(hidden, weight, bias):
            column, is_inside = _columns_in_tile(ids[tile.rows], tile.entries)
            logits = tile.logits.gather(1, column).squeeze(1)
            chosen[tile.rows] = torch.where(is_inside, logits, chosen[tile.rows])
            running.add(tile.rows, tile.logits)
        entropies = None if running.mean is None else running.normalizer - running.mean
        hits = None if running.mean is None else chosen >= running.top
        ctx.save_for_backward(hidden, weight, bias, ids, running.normalizer, entropies)
        # What is saved may come back as another tensor, whose `.grad` nobody reads.
        ctx.tiling, ctx.leaves = tiling, (weight, bias) if tiling.in_place else (None, None)
        ctx.set_materialize_grads(False)
        return chosen - running.normalizer, entropies, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, ids, normalizer, entropies = ctx.saved_tensors
        wide = normalizer.dtype
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[3:]
        of_hidden = torch.zeros_like(hidden, dtype=wide) if needs_hidden else None
        of_weight = _Total(weight, ctx.leaves[0], wide) if needs_weight else None
        of_bias = _Total(bias, ctx.leaves[1], wide) if needs_bias else None
        for tile in ctx.tiling.walk(hidden, weight, bias):
            grad = _gradient(tile, ids, normalizer, entropies, grads)
            grad = ctx.tiling.transform.backward(grad, tile.logits)
            if of_bias is not None:
                of_bias.at(tile.entries).add_(grad.sum(0))
            grad = grad.to(tile.hidden.dtype)
            if of_hidden is not None:
                _add_product(of_hidden[tile.rows], grad, tile.weight)
            if of_weight is not None:
                _add_product(of_weight.at(tile.entries), grad.t(), tile.hidden)
            del grad  # frees memory before the next tile
        if of_hidden is not None:
            of_hidden = of_hidden.to(hidden.dtype)
        return None, None, None, of_hidden, _result(of_weight), _result(of_bias)


def _gradient(
    tile: _Tile, ids: Tensor, normalizer: Tensor, entropies: Tensor | None, grads: Any
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


class _Total:
    """The gradient of a weight or bias, summed over all tokens a tile of the vocabulary at a time.

    A sum is in float32, and rounded once: into `.grad` of a leaf that allows it, else a matrix.
    """

    def __init__(self, parameter: Tensor, leaf: Tensor | None, wide: torch.dtype):
        self.is_shown = leaf is None or not adds_in_place(leaf)
        self.whole = torch.zeros_like(parameter) if self.is_shown else grad_of(leaf)
        self._wide = wide
        self._entries = slice(0, 0)
        self._tile = self.whole[self._entries]

    def at(self, entries: slice) -> Tensor:
        """What is added to for a tile: what is as precise as a sum, without another matrix."""
        if entries != self._entries:
            self.store()
            self._entries, self._tile = entries, self.whole[entries]
            if self._tile.dtype != self._wide:
                self._tile = torch.zeros_like(self._tile, dtype=self._wide)
        return self._tile

    def store(self) -> None:
        """Add the sum of the last tile to the whole."""
        if self._tile.dtype != self.whole.dtype:
            self.whole[self._entries] += self._tile


def _result(total: _Total | None) -> Tensor | None:
    """All of a gradient, unless it was added in place or is not needed."""
    if total is None:
        return None
    total.store()
    return total.whole if total.is_shown else None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to a total of the same or a wider dtype, in place."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
        return
    # The product exists in its own dtype before it is added: a block of rows at a time.
    step = max(1, PRODUCT_ELEMENTS // right.shape[1])
    for start in range(0, len(left), step):
        rows = slice(start, start + step)
        total[rows] += left[rows] @ right


def _columns_in_tile(ids: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
    """The column of each id in a tile, (M, 1), and whether the tile has it, (M,)."""
    column = ids - entries.start
    width = entries.stop - entries.start
    is_inside = (column >= 0) & (column < width)
    return column.clamp(0, width - 1)[:, None], is_inside
