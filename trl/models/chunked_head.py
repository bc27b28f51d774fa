"""A bounded head for projections that must be called: adapters, quantized weights, hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from ..ops.logprobs import token_log_probs, token_statistics

Run = Callable[[Tensor], Tensor]


def module_log_probs(
    run: Run,
    parameters: Sequence[nn.Parameter],
    hidden: Tensor,
    ids: Tensor,
    step: int,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of ids under softmax(run(hidden)), a few tokens at a time.

    Each chunk's logits are computed again in the backward pass, with the same random numbers.
    Gradients of the parameters are summed over the chunks in float32 before they are rounded.

    Args:
        run: maps hidden states (m, H) to logits (m, V).
        parameters: trainable parameters that `run` reads.
        hidden (`Tensor`): (M, H).
        ids (`Tensor`): (M,).
        step (`int`): tokens whose logits are held at once.
        with_entropy (`bool`): also return entropies (M,), in nats.
    """
    call = (run, step, with_entropy)
    return _ModuleLogProbs.apply(hidden, ids, call, *parameters)


def checkpointed_log_probs(
    run: Run, hidden: Tensor, ids: Tensor, step: int, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """As `module_log_probs`, for modules whose own hooks must see the backward pass.

    Gradients of the parameters are summed in their own precision, as autograd does it. In bfloat16
    that rounds: by 0.6 % over 40 chunks of one sign, by 3 % over 160. Adapters are float32 unless
    peft is told otherwise.
    """

    def piece(hidden: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        return _statistics(run(hidden), ids, with_entropy)

    found = [
        checkpoint(piece, hidden[at : at + step], ids[at : at + step], use_reentrant=False)
        for at in range(0, len(hidden), step)
    ]
    logps, *entropies = (torch.cat(part) for part in zip(*found, strict=True))
    return logps, entropies[0] if entropies else None


def _statistics(logits: Tensor, ids: Tensor, with_entropy: bool) -> tuple[Tensor, ...]:
    if with_entropy:
        return token_statistics(logits, ids)
    return (token_log_probs(logits, ids),)


class _ModuleLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, ids: Tensor, call: tuple[Run, int, bool], *parameters: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        run, step, with_entropy = call
        ctx.random = torch.get_rng_state(), get_device_states(hidden)
        ctx.pieces = [slice(at, at + step) for at in range(0, len(hidden), step)]
        found = [_statistics(run(hidden[at]), ids[at], with_entropy) for at in ctx.pieces]
        ctx.save_for_backward(hidden, ids)
        ctx.call, ctx.parameters = call, parameters
        ctx.set_materialize_grads(False)
        logps, *entropies = (torch.cat(part) for part in zip(*found, strict=True))
        return logps, entropies[0] if entropies else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        (hidden, ids), parameters = ctx.saved_tensors, ctx.parameters
        run, _, with_entropy = ctx.call
        grad_hidden = torch.zeros_like(hidden)
        wide = [torch.promote_types(p.dtype, torch.float32) for p in parameters]
        sums = [torch.zeros_like(p, dtype=d) for p, d in zip(parameters, wide, strict=True)]
        with _random_numbers(*ctx.random):
            for piece in ctx.pieces:
                part = hidden[piece].detach().requires_grad_()
                with torch.enable_grad():
                    found = _statistics(run(part), ids[piece], with_entropy)
                pairs = zip(found, grads, strict=False)
                used = [(value, grad[piece]) for value, grad in pairs if grad is not None]
                values, upstream = zip(*used, strict=True)
                inputs = [part, *parameters]
                results = torch.autograd.grad(values, inputs, upstream, allow_unused=True)
                grad_hidden[piece] = results[0]
                for total, result in zip(sums, results[1:], strict=True):
                    if result is not None:
                        total += result
        cast = [total.to(p.dtype) for total, p in zip(sums, parameters, strict=True)]
        return grad_hidden, None, None, *cast


@contextmanager
def _random_numbers(state: Tensor, devices: tuple[list[int], list[Tensor]]) -> Iterator[None]:
    """Draw inside what was drawn after these states, and go on outside as if nothing was."""
    with torch.random.fork_rng(devices=devices[0]):
        torch.set_rng_state(state)
        set_device_states(*devices)
        yield
