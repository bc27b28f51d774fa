"""Gradients that are added to `.grad` as they arise, without a separate gradient matrix.

Autograd first builds each gradient of a weight as a whole, then adds it to `.grad`: up to three
matrices of V x H entries for an embedding and a head. The functions here return None to autograd
instead, as for a weight without gradient. Autograd still runs the weight's accumulation node last,
so hooks on that node (such as DDP's) find `.grad` complete. Hooks on the weight itself would not
see any gradient, so a weight that has such a hook is left to autograd.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import embedding

from .torch_internals import has_gradient_hooks


def adds_in_place(weight: Tensor) -> bool:
    """Whether the gradient of a weight may be added to its `.grad` without any hook seeing it."""
    return (
        type(weight) is nn.Parameter
        and weight.is_leaf
        and not has_gradient_hooks(weight)
        and (weight.grad is None or weight.grad.layout == torch.strided)
    )


def grad_of(weight: Tensor) -> Tensor:
    """Return `.grad` of a weight; if there is none, set it to zeros first."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


class WaitingRows:
    """Row gradients of embedding lookups, collected over several backward passes.

    A `.grad` that does not exist yet is allocated in the last pass, so that no matrix of vocabulary
    size is held during the passes before. It is allocated earlier once the rows amount to a quarter
    of the vocabulary.
    """

    def __init__(self, is_last: bool = True):
        self.is_last = is_last  # whether the last pass has begun
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []  # weight, ids (T,), gradients (T, H)

    def add(self, weight: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Collect the gradients of some rows; hooks of the last pass find `.grad` complete."""
        self._rows.append((weight, ids, rows))
        count = sum(len(ids) for _, ids, _ in self._rows)
        if self.is_last or weight.grad is not None or 4 * count > len(weight):
            self.flush()

    def flush(self) -> None:
        """Add all waiting rows to `.grad`, in the order in which they arrived."""
        for weight, ids, rows in self._rows:
            grad_of(weight).index_add_(0, ids, rows)
        self._rows.clear()


# Collects the gradients of lookups; None outside `several_passes`.
_waiting_rows: ContextVar[WaitingRows | None] = ContextVar("waiting_rows", default=None)


@contextmanager
def several_passes() -> Iterator[WaitingRows]:
    """Delay the gradients of lookups made inside to the last pass; the caller sets `is_last`."""
    rows = WaitingRows(is_last=False)
    token = _waiting_rows.set(rows)
    try:
        yield rows
        rows.flush()
    finally:
        _waiting_rows.reset(token)


def look_up(ids: Tensor, weight: Tensor, padding: int | None = None) -> Tensor:
    """Look up rows (..., H) of a weight (V, H), whose gradient is added in place if it may be.

    The gradient of row `padding` is 0.
    """
    return _LookUp.apply(ids, weight, padding)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        ctx.padding = -1 if padding is None else padding
        ctx.waiting = _waiting_rows.get() or WaitingRows()
        return embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        weight = ctx.weight
        embedding_backward = torch.ops.aten.embedding_dense_backward
        if not adds_in_place(weight):
            return None, embedding_backward(grad, ids, len(weight), ctx.padding, False), None
        ids = ids.flatten().long()
        ranks = _rank_among_distinct(ids)
        wide = grad.flatten(0, -2).to(torch.promote_types(grad.dtype, torch.float32))
        # As many rows as tokens: asking the device for the number of distinct ids would block.
        rows = embedding_backward(wide, ranks, len(ids), -1, False)
        ids = torch.zeros_like(ids).scatter_(0, ranks, ids)
        rows.masked_fill_((ids == ctx.padding)[:, None], 0.0)
        # Each id occurs once, apart from rows of zeros at the end: no sum depends on the order.
        ctx.waiting.add(weight, ids, rows.to(weight.dtype))
        return None, None, None


def _rank_among_distinct(ids: Tensor) -> Tensor:
    """For each of the ids (T,), its rank (T,) among the sorted distinct ids."""
    ordered, order = ids.sort()
    is_next = torch.cat([torch.zeros_like(ids[:1]), (ordered[1:] != ordered[:-1]).long()])
    return torch.empty_like(ids).scatter_(0, order, is_next.cumsum(0))
