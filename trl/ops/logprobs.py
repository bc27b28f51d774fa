"""Log-probabilities and entropies of tokens from logits, a block of rows at a time.

Statistics are in float32 whatever the dtype of the logits (float64 stays float64). Neither the
forward nor the backward pass holds a float32 copy of all logits, only of a block.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

BLOCK_ELEMENTS = 2**23
# exp of this is 0, so a log-probability may be clamped here before it is multiplied by exp of it.
SMALLEST_LOG = -1e4


def token_scores(
    logits: Tensor, ids: Tensor, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probability of each id under softmax(logits / temperature).

    Logits are (..., V), -inf for an impossible token, and ids (...) lie in [0, V). Returns
    log-probabilities, entropies in nats, and whether each id is the top prediction; the last two
    are None unless `with_entropy`. All are (...), in float32, or float64 for float64 logits, and
    differentiable once.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be greater than 0, got {temperature}.")
    shape = logits.shape[:-1]
    if logits.is_contiguous() or logits.dim() < 3:
        logits = logits.reshape(-1, logits.shape[-1])
    ids = ids.reshape(logits.shape[:-1])
    logps, entropies, hits = _TokenStatistics.apply(logits, ids, temperature, with_entropy)
    if with_entropy:
        entropies = entropies.reshape(shape)
        hits = hits.reshape(shape)
    return logps.reshape(shape), entropies, hits


def _blocks(logits: Tensor) -> Iterator[tuple[int | slice, ...]]:
    """Yield indices of blocks of about `BLOCK_ELEMENTS` logits; each block is a view."""
    *outer, length, vocabulary = logits.shape
    step = max(1, BLOCK_ELEMENTS // max(1, vocabulary))
    for index in itertools.product(*map(range, outer)):
        for start in range(0, length, step):
            yield *index, slice(start, start + step)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype) / temperature


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, ids: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        wide = torch.promote_types(logits.dtype, torch.float32)
        logps = logits.new_empty(logits.shape[:-1], dtype=wide)
        entropies = torch.empty_like(logps) if with_entropy else None
        hits = torch.empty_like(logps, dtype=torch.bool) if with_entropy else None
        for block in _blocks(logits):
            all_logps = _scaled(logits[block], temperature).log_softmax(-1)
            logps[block] = all_logps.gather(-1, ids[block].unsqueeze(-1)).squeeze(-1)
            if entropies is not None and hits is not None:
                hits[block] = logps[block] >= all_logps.amax(-1)
                entropies[block] = torch.special.entr(all_logps.exp_()).sum(-1)
            del all_logps  # frees memory before the next block
        ctx.save_for_backward(logits, ids, entropies)
        return logps, entropies, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits, ids, entropies = ctx.saved_tensors
        result = torch.empty_like(logits)
        for block in _blocks(logits):
            scaled = _scaled(logits[block], ctx.temperature)
            upstream = tuple(None if grad is None else grad[block] for grad in grads[:2])
            entropy = None if entropies is None else entropies[block]
            grad = logit_gradient(scaled, scaled.logsumexp(-1), entropy, upstream)
            if upstream[0] is not None:
                grad.scatter_add_(-1, ids[block].unsqueeze(-1), upstream[0].unsqueeze(-1))
            result[block] = grad.div_(ctx.temperature)
            del scaled, grad
        return result, None, None, None


def logit_gradient(
    logits: Tensor, normalizer: Tensor, entropy: Tensor | None, upstream: tuple[Tensor | None, ...]
) -> Tensor:
    """Gradient of logits (M, V), without the term of the chosen token.

    d logp(id) / d z_j = [j = id] - p_j;  d H / d z_j = -p_j (log p_j + H).
    `upstream` holds the gradients (M,) of log-probabilities and entropies; `entropy` (M,) is read
    only if the latter is not None.
    """
    log_p = logits - normalizer[:, None]
    grad_logps, grad_entropies = upstream
    if grad_entropies is None or entropy is None:
        scale = torch.zeros_like(normalizer) if grad_logps is None else grad_logps
        return log_p.exp_().mul_(-scale[:, None])
    probabilities = log_p.exp()
    terms = log_p.clamp_(min=SMALLEST_LOG).add_(entropy[:, None])
    terms.mul_(grad_entropies[:, None])
    if grad_logps is not None:
        terms.add_(grad_logps[:, None])
    return probabilities.mul_(terms).neg_()
