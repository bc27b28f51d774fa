"""Gradients that are added to `.grad` as they arise, without ever being a separate matrix.

Autograd first makes each gradient of a weight as a whole, then adds it to `.grad`: for an embedding
and a head of V x H entries, up to three matrices of that size. Here it is given None instead, as
for a weight without gradient: autograd still runs the node of the weight, last, whose hooks (those
of DDP are there) find `.grad` complete. Hooks on the weight itself would be given nothing, so a
weight that has any is left to autograd.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding

from ..torch_internals import has_gradient_hooks


def adds_in_place(weight: Tensor) -> bool:
    """Whether the gradient of a weight may be added to its `.grad` without any hook seeing it."""
    return (
        type(weight) is nn.Parameter
        and weight.is_leaf
        and not has_gradient_hooks(weight)
        and (weight.grad is None or weight.grad.layout == torch.strided)
    )


def grad_of(weight: Tensor) -> Tensor:
    """`.grad` of a weight, zeros if there was none."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


class WaitingRows:
    """Gradients of lookups in several backward passes, of which only the rows are kept at first.

    A `.grad` that does not exist yet is made in the last pass, so that no matrix of a vocabulary
    is held while the others are computed. It is made sooner if the rows amount to a quarter
    of the vocabulary.
    """

    def __init__(self, is_last: bool = True):
        self.is_last = is_last  # whether the last of the passes has begun
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []  # weight, ids (T,), gradients (T, H)

    def add(self, weight: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Take the gradients of some rows; hooks of the last pass find `.grad` complete."""
        self._rows.append((weight, ids, rows))
        count = sum(len(ids) for _, ids, _ in self._rows)
        if self.is_last or weight.grad is not None or 4 * count > len(weight):
            self.flush()

    def flush(self) -> None:
        """Add all rows that wait, in the order in which they came."""
        for weight, ids, rows in self._rows:
            grad_of(weight).index_add_(0, ids, rows)
        self._rows.clear()


# Where the gradients of lookups wait; None outside `several_passes`.
_waiting_rows: ContextVar[WaitingRows | None] = ContextVar("waiting_rows", default=None)


@contextmanager
def several_passes() -> Iterator[WaitingRows]:
    """Let gradients of lookups made inside wait for the last pass; the caller sets `is_last`."""
    rows = WaitingRows(is_last=False)
    token = _waiting_rows.set(rows)
    try:
        yield rows
        rows.flush()
    finally:
        _waiting_rows.reset(token)


def look_up(ids: Tensor, weight: Tensor, padding: int | None = None) -> Tensor:
    """Rows (..., H) of a weight (V, H), whose gradient, 0 for the id `padding`, may go in place."""
    return _LookUp.apply(ids, weight, padding)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, -1 if padding is None else padding
        ctx.waiting = _waiting_rows.get() or WaitingRows()
        return embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        sums = torch.ops.aten.embedding_dense_backward
        if not adds_in_place(weight):
            return None, sums(grad, ids, len(weight), ctx.padding, False), None
        ids = ids.flatten().long()
        places = _places(ids)
        wide = grad.flatten(0, -2).to(torch.promote_types(grad.dtype, torch.float32))
        # As many rows as tokens: to ask a device how many ids differ would be to wait for it.
        rows = sums(wide, places, len(ids), -1, False)
        ids = torch.zeros_like(ids).scatter_(0, places, ids)
        rows.masked_fill_((ids == ctx.padding)[:, None], 0.0)
        # Each id is there once, besides rows of zeros at the end: the order cannot change a sum.
        ctx.waiting.add(weight, ids, rows.to(weight.dtype))
        return None, None, None


def _places(ids: Tensor) -> Tensor:
    """Which one of the different ids, in order, each of the ids (T,) is."""
    ordered, order = ids.sort()
    is_next = torch.cat([torch.zeros_like(ids[:1]), (ordered[1:] != ordered[:-1]).long()])
    return torch.empty_like(ids).scatter_(0, order, is_next.cumsum(0))
