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

# Measured by `make bench-head`: smaller tiles lose time to launches, larger ones gain none.
CHUNK_ON_CPU = 2**20
CHUNK_ON_ACCELERATOR = 2**27
TOKENS_IN_TILE = 1024


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
            products.div_(self.softcap).tanh_().mul_(self.softcap)
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
    """How logits are computed.

    Args:
        transform (`LogitTransform`): temperature, scale and soft cap.
        chunk (`int`, *optional*): logits held at once. None: a measured default for the device.
        dtype (`torch.dtype`, *optional*): of the matrix products. None: that of the weight.
    """

    transform: LogitTransform = LogitTransform()
    chunk: int | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class _Tiles:
    transform: LogitTransform
    chunk: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tiling: Tiling, weight: Tensor) -> _Tiles:
        chunk = default_chunk(weight.device) if tiling.chunk is None else tiling.chunk
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {chunk}.")
        return cls(tiling.transform, chunk, tiling.dtype or weight.dtype)

    def tokens(self, count: int) -> list[slice]:
        step = max(1, min(TOKENS_IN_TILE, self.chunk // 64))
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    def vocabulary(self, size: int, tokens: int) -> Iterator[slice]:
        step = max(64, self.chunk // max(1, min(TOKENS_IN_TILE, tokens)))
        for start in range(0, size, step):
            yield slice(start, min(start + step, size))

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Logits of a tile in float32 (float64 stays), from operands already in `dtype`."""
        products = hidden @ weight.t() if bias is None else torch.addmm(bias, hidden, weight.t())
        wide = products.to(torch.promote_types(self.dtype, torch.float32))
        return self.transform.forward(wide)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    tiling: Tiling = Tiling(),  # noqa: B008 - frozen
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each id under softmax(transform(hidden @ weight.T + bias)).

    Args:
        hidden (`Tensor`): (M, H).
        weight (`Tensor`): (V, H).
        ids (`Tensor`): (M,) integers in [0, V).
        bias (`Tensor`, *optional*): (V,).
        tiling (`Tiling`): what is done to the products, how many exist at once, and their dtype.
        with_entropy (`bool`): also return the entropy of each distribution, in nats.

    Returns:
        (M,) log-probabilities and (M,) entropies or None, float32 (float64 for float64 products);
        differentiable once, with respect to `hidden`, `weight` and `bias`.

    Raises:
        ValueError: if `temperature` is not greater than 0, or `chunk` is below 1.
    """
    tiles = _Tiles.of(tiling, weight)
    # Each cast to the dtype of the products is explicit.
    with torch.autocast(hidden.device.type, enabled=False):
        logps, entropies = _LinearLogProbs.apply(hidden, weight, bias, ids, tiles, with_entropy)
    return logps, entropies


def default_chunk(device: torch.device) -> int:
    """Logits to hold at once on a device."""
    return CHUNK_ON_CPU if device.type == "cpu" else CHUNK_ON_ACCELERATOR


class _Running:
    """Log-normalizer, and mean logit if asked for, over the vocabulary seen so far."""

    def __init__(self, like: Tensor, with_entropy: bool):
        self.normalizer = torch.full_like(like, -torch.inf)
        self.mean = torch.zeros_like(like) if with_entropy else None

    def add(self, rows: slice, logits: Tensor) -> None:
        """Take the logits of a tile into account; they are overwritten."""
        before = self.normalizer[rows]
        largest = torch.maximum(before, logits.amax(1))
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
            kept = (before - after).exp() * self.mean[rows]
            self.mean[rows] = kept + weighted * (shift - after).exp()
        self.normalizer[rows] = after


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        tiles: _Tiles,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        wide = torch.promote_types(tiles.dtype, torch.float32)
        chosen = hidden.new_zeros(len(hidden), dtype=wide)
        running = _Running(chosen, with_entropy)
        cast = hidden.to(tiles.dtype)
        for entries in tiles.vocabulary(len(weight), len(hidden)):
            part = weight[entries].to(tiles.dtype)
            shift = None if bias is None else bias[entries].to(tiles.dtype)
            for rows in tiles.tokens(len(hidden)):
                logits = tiles.logits(cast[rows], part, shift)
                place, inside = _places(ids[rows], entries)
                found = logits.gather(1, place).squeeze(1)
                chosen[rows] = torch.where(inside, found, chosen[rows])
                running.add(rows, logits)
        entropies = None
        if running.mean is not None:
            entropies = running.normalizer - running.mean
        ctx.save_for_backward(hidden, weight, bias, ids, running.normalizer, entropies)
        ctx.tiles = tiles
        ctx.set_materialize_grads(False)
        return chosen - running.normalizer, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, ids, normalizer, entropies = ctx.saved_tensors
        tiles, (for_hidden, for_weight, for_bias) = ctx.tiles, ctx.needs_input_grad[:3]
        wide = normalizer.dtype
        grad_hidden = torch.zeros_like(hidden, dtype=wide) if for_hidden else None
        grad_weight = torch.empty_like(weight) if for_weight else None
        grad_bias = torch.empty_like(bias) if for_bias else None
        cast = hidden.to(tiles.dtype)
        for entries in tiles.vocabulary(len(weight), len(hidden)):
            part = weight[entries].to(tiles.dtype)
            shift = None if bias is None else bias[entries].to(tiles.dtype)
            sums = _TileSums(part, wide, for_weight, for_bias)
            for rows in tiles.tokens(len(hidden)):
                logits = tiles.logits(cast[rows], part, shift)
                upstream = tuple(None if grad is None else grad[rows] for grad in grads)
                entropy = None if entropies is None else entropies[rows]
                grad = _logit_gradient(logits, normalizer[rows], entropy, upstream)
                if upstream[0] is not None:
                    place, inside = _places(ids[rows], entries)
                    grad.scatter_add_(1, place, (upstream[0] * inside)[:, None])
                grad = tiles.transform.backward(grad, logits)
                sums.add_bias(grad)
                grad = grad.to(tiles.dtype)
                if grad_hidden is not None:
                    _add_product(grad_hidden[rows], grad, part)
                sums.add_weight(grad, cast[rows])
            sums.store(entries, grad_weight, grad_bias)
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


class _TileSums:
    """Gradients of a tile of the weight and bias, summed over all tokens in float32."""

    def __init__(self, part: Tensor, wide: torch.dtype, for_weight: bool, for_bias: bool):
        self.weight = torch.zeros_like(part, dtype=wide) if for_weight else None
        self.bias = part.new_zeros(len(part), dtype=wide) if for_bias else None

    def add_bias(self, grad: Tensor) -> None:
        if self.bias is not None:
            self.bias.add_(grad.sum(0))

    def add_weight(self, grad: Tensor, hidden: Tensor) -> None:
        if self.weight is not None:
            _add_product(self.weight, grad.t(), hidden)

    def store(self, entries: slice, weight: Tensor | None, bias: Tensor | None) -> None:
        if weight is not None:
            weight[entries] = self.weight
        if bias is not None:
            bias[entries] = self.bias


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to a total of the same or a wider dtype, in place."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _places(ids: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
    """Where each id is in a tile, (M, 1), and whether it is there, (M,)."""
    place = ids - entries.start
    inside = (place >= 0) & (place < entries.stop - entries.start)
    return place.clamp(0, entries.stop - entries.start - 1)[:, None], inside


def _logit_gradient(
    logits: Tensor,
    normalizer: Tensor,
    entropy: Tensor | None,
    upstream: tuple[Tensor | None, ...],
) -> Tensor:
    """Gradient of a tile's logits, without the term of the chosen token.

    d logp(id) / d z_j = [j = id] - p_j;  d H / d z_j = -p_j (log p_j + H).
    """
    log_p = logits - normalizer[:, None]
    grad_logps, grad_entropies = upstream
    if grad_entropies is None:
        scale = torch.zeros_like(normalizer) if grad_logps is None else grad_logps
        return log_p.exp_().mul_(-scale[:, None])
    probabilities = log_p.exp()
    terms = log_p.clamp_(min=torch.finfo(log_p.dtype).min).add_(entropy[:, None])  # type: ignore[index]
    terms.mul_(grad_entropies[:, None])
    if grad_logps is not None:
        terms.add_(grad_logps[:, None])
    return probabilities.mul_(terms).neg_()
