"""Refuse models whose tokens see what follows them, such as BERT."""

import torch
from torch import Tensor, nn

from ..ops.matmul_precision import highest_matmul_precision
from .sharded import is_sharded
from .unwrap import causal_model, evaluating

PROBES = [[1, 2, 3, 4], [1, 2, 5, 6]]  # ids with a common prefix
# Of the norm of logits, in single and in half precision; rounding is far below.
LARGEST_CHANGE = 5e-3
LARGEST_CHANGE_IN_HALF_PRECISION = 0.05
LARGEST_CHANGE_OF_DECODERS = 1e-4  # the same in full single precision


class NotCausalError(ValueError):
    """Tokens of a model see the tokens after them, which they should predict."""


def refuse_encoder(model: nn.Module) -> None:
    """Raise a `NotCausalError` if no attention layer of a model is causal, as in BERT.

    If no layer declares `is_causal`, the logits of a few tokens decide; the bound is lower if some
    layer declares that it is not causal. A model that is already sharded is not checked here:
    `HeadFinder` does so before the first step.
    """
    causal = causal_model(model)
    modules = [module for module in causal.modules() if hasattr(module, "is_causal")]
    if any(module.is_causal for module in modules):
        return
    if is_sharded(model):
        return
    bound = LARGEST_CHANGE_OF_DECODERS if modules else LARGEST_CHANGE
    try:
        ids = torch.tensor(PROBES, device=next(causal.parameters()).device)
        with evaluating(model), torch.no_grad(), highest_matmul_precision():
            check_causal(causal, causal(input_ids=ids, use_cache=False).logits, bound)
    except NotCausalError:
        raise
    except Exception:  # an unknown model may raise anything
        return


def check_causal(causal: nn.Module, logits: Tensor, bound: float = LARGEST_CHANGE) -> None:
    """Raise if the logits (2, T, V) of `PROBES` differ at the last token of their common prefix.

    `bound` is the largest change in single precision, relative to the norm of the logits.
    """
    if torch.finfo(logits.dtype).bits <= 16:
        bound = LARGEST_CHANGE_IN_HALF_PRECISION
    first, second = logits[:, 1].float()
    if (first - second).norm() > bound * first.norm():
        raise NotCausalError(
            f"{type(causal).__name__} is not causal: what follows a token changes the logits at "
            "that token, so it would see what it is to predict. Encoders cannot be trained here; "
            "use a model that continues text. If this one can be a decoder, as BERT can, load it "
            "with is_decoder=True in its configuration."
        )
