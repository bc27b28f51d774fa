"""The precision of autocast in which a model trains, and in which a check of it must run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .quantized import working_precision
from .sharded import unwrapped
from .unwrap import causal_model, current_autocast


class _Reached(Exception):
    """A call has come to the decoder."""


@torch.no_grad()
def autocast_of(model: nn.Module) -> torch.dtype | None:
    """The precision of autocast in the decoder when `model` is called; None without.

    Accelerate puts autocast around the forward of the module that it prepared. The call ends
    before the decoder computes anything.

    Args:
        model: a causal language model, wrapped or not, whose weights are whole.
    """
    causal = causal_model(model)
    device = next(causal.parameters()).device
    found = [current_autocast(device)]

    def note(module: nn.Module, args: Any) -> None:
        found.append(current_autocast(device))
        raise _Reached

    handle = causal.base_model.register_forward_pre_hook(note, prepend=True)
    try:
        unwrapped(model).forward(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device))
    except _Reached:
        pass
    finally:
        handle.remove()
    return found[-1]


def precisions_to_check(
    model: nn.Module, autocast: torch.dtype | None
) -> Sequence[torch.dtype | None]:
    """Precisions of autocast for a check: none, where that is finer, and the one that trains.

    The finer one tells about the layout, by a difference that no rounding hides; the other about
    the kernels that will run.
    """
    if autocast is None:
        return (None,)
    own = working_precision(causal_model(model))
    return (autocast,) if coarsest(own, autocast) == own else (None, autocast)


def autocast_to(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Autocast in a precision; switched off for None."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def coarsest(*dtypes: torch.dtype | None) -> torch.dtype:
    """The least precise of floating dtypes; None counts for nothing."""
    return max(filter(None, dtypes), key=lambda dtype: torch.finfo(dtype).eps)
