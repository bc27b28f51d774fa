"""A bounded head for projections that must be called: adapters, quantized weights, hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ..ops.logprobs import token_scores

Run = Callable[[Tensor], Tensor]


def chunked_log_probs(
    run: Run, hidden: Tensor, ids: Tensor, step: int, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probabilities (M,) of ids (M,) under softmax(run(hidden)), `step` tokens at a time.

    `run` maps hidden states (m, H) to logits (m, V), which are computed again in the backward pass,
    with the same random numbers. With entropies (M,) and which ids are likeliest, if asked.
    """

    def piece(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        # A weight that is cast once for all chunks would sum their gradients in what it is cast to.
        with torch.autocast(hidden.device.type, enabled=False, cache_enabled=False):
            return token_scores(run(hidden), ids, with_entropy=with_entropy)

    pieces = zip(hidden.split(step), ids.split(step), strict=True)
    found = [checkpoint(piece, *part, use_reentrant=False) for part in pieces]
    logps, *others = zip(*found, strict=True)
    entropies, hits = (torch.cat(x) if with_entropy else None for x in others)
    return torch.cat(logps), entropies, hits


def summing_in_float32(module: nn.Module) -> Run:
    """A way to call `module` that adds gradients of several calls in float32, and rounds the sum.

    Autograd adds in the precision of the parameters. In bfloat16 that is off by 0.6 % over 40
    chunks of one sign, by 3 % over 160.
    """
    halves = {
        name: (parameter.detach(), _Sum.apply(parameter))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and torch.finfo(parameter.dtype).bits < 32
    }

    def call(hidden: Tensor) -> Tensor:
        used = {name: _Use.apply(*pair) for name, pair in halves.items()}
        return functional_call(module, used, (hidden,))

    return call if halves else module


class _Sum(torch.autograd.Function):
    """Where gradients of a parameter are added: of its shape in float32, without taking memory."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return parameter.new_zeros((), dtype=torch.float32).expand_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(ctx.dtype)


class _Use(torch.autograd.Function):
    """A parameter whose gradient goes to its sum."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, total: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad.float()
