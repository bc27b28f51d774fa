"""The policy as generation needs it: without distributed wrappers, in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from .parts import evaluating


def check_engine(accelerator: Accelerator) -> None:
    """Refuse sharded training, whose weights generation cannot see yet.

    Raises:
        ValueError: under FSDP or DeepSpeed ZeRO-3.
    """
    kind = accelerator.distributed_type
    sharded = kind == DistributedType.FSDP
    if kind == DistributedType.DEEPSPEED:
        sharded = accelerator.state.deepspeed_plugin.zero_stage == 3
    if sharded:
        raise ValueError(
            f"Generation from weights sharded by {kind.value} is not available in this release; "
            "use one process, or data parallelism (--accelerate_config multi_gpu)."
        )


@contextmanager
def policy_for_inference(model: nn.Module, accelerator: Accelerator) -> Iterator[Any]:
    """Yield the bare policy in evaluation mode and under the autocast of training.

    Evaluation mode switches dropout and activation recomputation off, so that completions come
    from the policy itself.
    """
    with evaluating(accelerator.unwrap_model(model)) as bare, accelerator.autocast():
        yield bare
