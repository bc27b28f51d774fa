"""Functions of torch that have only private names; checked in torch 2.11 to 2.15.

CONTRIBUTING.md says why each is needed. Imports torch and the standard library.
"""

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "TorchDispatchMode",
    "tree_leaves",
    "tree_map",
]  # documented under these names, in private modules

# Attributes in which FSDP1, activation checkpointing and `torch.compile` store the wrapped module.
# They appear in the names of its weights.
WRAPPER_ATTRIBUTES = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def is_wrapper_subclass(tensor: Tensor) -> bool:
    """Return whether a tensor wraps other tensors that hold its values, such as a DTensor."""
    result: bool = is_traceable_wrapper_subclass(tensor)
    return result


def version_counter(tensor: Tensor) -> int:
    """Return autograd's count of in-place writes to a tensor."""
    result: int = tensor._version
    return result


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Return whether the tensor has hooks that are called with its gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return a module's own dictionaries of pre-forward and forward hooks. They can be modified."""
    return module._forward_pre_hooks, module._forward_hooks


def non_persistent_buffers(module: nn.Module) -> Set[str]:
    """Return the names of a module's own buffers that are not in its state dict.

    Comparing with a state dict would work too, but making one gathers sharded weights.
    """
    result: Set[str] = module._non_persistent_buffers_set
    return result


def module_before_compile(module: nn.Module) -> nn.Module | None:
    """Return the original of a module that `torch.compile` returned; None for other modules."""
    return getattr(module, "_orig_mod", None)


def default_store() -> torch.distributed.Store:
    """Return the key-value store through which the default process group was set up."""
    return torch.distributed.distributed_c10d._get_default_store()


def reshard_fsdp1(module: nn.Module) -> None:
    """Free the gathered weights that an FSDP1 module keeps after a forward without backward."""
    from torch.distributed.fsdp._runtime_utils import _reshard

    handle: Any = module._handle
    if handle is not None and handle.uses_sharded_strategy:  # false on one process
        _reshard(module, handle, True)
