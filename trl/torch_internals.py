"""What torch offers under private names alone; seen in torch 2.11 to 2.15.

CONTRIBUTING.md lists why each is needed. Imports torch and the standard library.
"""

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["TorchDispatchMode", "tree_leaves", "tree_map"]  # documented, but under these names

# Attributes in which FSDP1, activation checkpointing and `torch.compile` hold the module they wrap.
# They are part of the names of its weights.
WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def holds_tensors(tensor: Tensor) -> bool:
    """Whether a tensor is a subclass whose values are in tensors inside it, such as a DTensor."""
    return is_traceable_wrapper_subclass(tensor)


def change_count(tensor: Tensor) -> int:
    """Return how often a tensor was written to in place: autograd's own counter."""
    return tensor._version


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether a hook on the tensor itself would be called with its gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks before and after a module's forward, in dictionaries that can be changed."""
    return module._forward_pre_hooks, module._forward_hooks


def unsaved_buffers(module: nn.Module) -> Set[str]:
    """Return the names of a module's own buffers that its state dict leaves out.

    A state dict would tell them too, but making one gathers sharded weights.
    """
    return module._non_persistent_buffers_set


def compiled_from(module: nn.Module) -> nn.Module | None:
    """Return the module that `torch.compile` wraps; None for any other module."""
    return getattr(module, "_orig_mod", None)


def default_store() -> Any:
    """Return the store in which the ranks of the default process group meet."""
    return torch.distributed.distributed_c10d._get_default_store()


def reshard_fsdp1(unit: nn.Module) -> None:
    """Give back the whole weights that a unit of FSDP1 keeps after a forward without backward."""
    from torch.distributed.fsdp._runtime_utils import _reshard

    handle: Any = unit._handle
    if handle is not None and handle.uses_sharded_strategy:  # it is not on one process
        _reshard(unit, handle, True)  # type: ignore[arg-type]
