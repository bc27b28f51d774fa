"""Log-probabilities and entropies from hidden states, without ever holding their logits.

Logits exist one tile (tokens x vocabulary entries) at a time and are computed again in the backward
pass. Tiles run over the vocabulary outside and over the tokens inside, so the gradient of a tile of
the weight is complete, in float32, before it is rounded to the weight's dtype: nothing drifts when
the weights are bfloat16. Statistics follow the online softmax of arXiv 1805.02867.

Shapes: M tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

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

    logits = softcap * tanh(scale * z / softcap) / temperature; without `softcap`, the tanh is left
    out.
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
                wide = products.to(torch.promote_types(dtype, torch.float32))
                yield _Tile(rows, entries, left, part, self.transform.forward(wide))


@dataclass(frozen=True)
class _Tile:
    rows: slice
    entries: slice  # of the vocabulary
    hidden: Tensor
    weight: Tensor
    logits: Tensor  # in float32 at least


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

    Args:
        hidden, weight, bias (`Tensor`): (M, H), (V, H) and (V,).
        ids (`Tensor`): (M,) integers in [0, V).
        tiling (`Tiling`): what is done to the products, how many exist at once, and their dtype.

    Returns:
        (M,) log-probabilities; `with_entropy`, entropies in nats, and whether each id is the
        likeliest, else None. In float32 (float64 for float64 products), differentiable once.

    Raises:
        ValueError: if `temperature` is not greater than 0, or `chunk` is below 1.
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
    """Logits to hold at once on a device."""
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
            kept = (before - reached).exp() * self.mean[rows]
            self.mean[rows] = kept + weighted * (shift - reached).exp()
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
            place, inside = _places(ids[tile.rows], tile.entries)
            found = tile.logits.gather(1, place).squeeze(1)
            chosen[tile.rows] = torch.where(inside, found, chosen[tile.rows])
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
        needed = ctx.needs_input_grad[3:]
        sums = _Sums((hidden, weight, bias), needed, ctx.leaves, normalizer.dtype)
        for tile in ctx.tiling.walk(hidden, weight, bias):
            rows = tile.rows
            upstream = tuple(None if grad is None else grad[rows] for grad in grads[:2])
            entropy = None if entropies is None else entropies[rows]
            grad = logit_gradient(tile.logits, normalizer[rows], entropy, upstream)
            if upstream[0] is not None:
                place, inside = _places(ids[rows], tile.entries)
                grad.scatter_add_(1, place, (upstream[0] * inside)[:, None])
            sums.add(tile, ctx.tiling.transform.backward(grad, tile.logits))
        return None, None, None, *sums.results()


class _Sums:
    """Gradients of hidden states, weight and bias, where they are needed.

    Those of the weight and bias are summed over all tokens in float32, a tile of the vocabulary at
    a time, and rounded once: into `.grad` of the leaves that may be added to, else into matrices.
    """

    def __init__(
        self,
        inputs: tuple[Tensor | None, ...],
        needed: tuple[bool, ...],
        leaves: tuple[Tensor | None, ...],
        wide: torch.dtype,
    ):
        hidden, *parameters = inputs
        shown = torch.as_tensor(hidden)
        self._dtype = shown.dtype
        self._hidden = torch.zeros_like(shown, dtype=wide) if needed[0] else None
        self._leaves = [x if x is not None and adds_in_place(x) else None for x in leaves]
        wanted = [x if needs else None for x, needs in zip(parameters, needed[1:], strict=True)]
        self._totals = [
            None if x is None else torch.zeros_like(x) if leaf is None else grad_of(leaf)
            for x, leaf in zip(wanted, self._leaves, strict=True)
        ]
        self._wide = wide
        self._tile: list[Tensor | None] = [None, None]
        self._entries: slice | None = None

    def add(self, tile: _Tile, grad: Tensor) -> None:
        """Add what the gradient (m, v) of the products of a tile says."""
        if tile.entries != self._entries:
            self._store()
            self._entries = tile.entries
            self._tile = [
                None if total is None else self._sum_for(total[tile.entries])
                for total in self._totals
            ]
        of_weight, of_bias = self._tile
        if of_bias is not None:
            of_bias.add_(grad.sum(0))
        grad = grad.to(tile.hidden.dtype)
        if self._hidden is not None:
            _add_product(self._hidden[tile.rows], grad, tile.weight)
        if of_weight is not None:
            _add_product(of_weight, grad.t(), tile.hidden)

    def _sum_for(self, part: Tensor) -> Tensor:
        """What is as precise as the sums is added to without another matrix."""
        return part if part.dtype == self._wide else torch.zeros_like(part, dtype=self._wide)

    def _store(self) -> None:
        for total, part in zip(self._totals, self._tile, strict=True):
            if total is not None and part is not None and total.dtype != part.dtype:
                total[self._entries] += part

    def results(self) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states, weight and bias."""
        self._store()
        hidden = None if self._hidden is None else self._hidden.to(self._dtype)
        pairs = zip(self._totals, self._leaves, strict=True)
        return hidden, *(total if leaf is None else None for total, leaf in pairs)


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


def _places(ids: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
    """Where each id is in a tile, (M, 1), and whether it is there, (M,)."""
    place = ids - entries.start
    inside = (place >= 0) & (place < entries.stop - entries.start)
    return place.clamp(0, entries.stop - entries.start - 1)[:, None], inside
