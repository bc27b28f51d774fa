"""The policy as generation needs it: without distributed wrappers, whole, in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from torch import nn

from .lm_head import evaluating
from .sharded import gathered


@contextmanager
def policy_for_inference(
    model: nn.Module, accelerator: Accelerator, at_once: bool = True
) -> Iterator[Any]:
    """Yield the bare policy in evaluation mode and under the autocast of training.

    Evaluation mode switches dropout and activation recomputation off, so that completions come
    from the policy itself. Sharded weights are gathered; then all ranks must enter and leave
    together, even after an error.

    Args:
        model: the policy as it was prepared for training.
        accelerator (`Accelerator`): that prepared it.
        at_once (`bool`): False: a layer is gathered while it runs; see `shards.gathered`.
    """
    bare = accelerator.unwrap_model(model)
    with gathered(model, at_once), evaluating(bare), accelerator.autocast():
        yield bare
