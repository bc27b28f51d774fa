"""Weights of which each rank holds a part: DeepSpeed ZeRO-3, FSDP1, FSDP2.

Training leaves it to hooks of these engines when a module's weights are gathered. In here the hooks
are off, so that nothing communicates but what is written here.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from ..imports import require
from ..torch_internals import forward_hooks, module_before_compile, reshard_fsdp1

# Holds the whole weights that belong to modules themselves, not to their children: in a block, or
# in each call of a function that it decorates.
Gather = Callable[[Sequence[nn.Module]], Any]
# Their hooks around forwards communicate.
PACKAGES = ("deepspeed", "torch.distributed.fsdp")


@contextmanager
def gather_zero3(modules: Sequence[nn.Module]) -> Iterator[None]:
    """DeepSpeed ZeRO-3: each parameter is partitioned."""
    with gathered_parameters(p for m in modules for p in m.parameters(recurse=False)):
        yield


def gathered_parameters(
    parameters: Iterable[Any], changed_by: int | None = None
) -> AbstractContextManager[Any]:
    """Hold whole what ZeRO-3 has partitioned; ranks take over what rank `changed_by` changes."""
    found = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not found:
        return nullcontext()
    for parameter in found:
        # Marks that a forward without backward left would forbid to partition it again.
        parameter.ds_active_sub_modules.clear()
    gather = require("deepspeed", "ZeRO-3").zero.GatheredParameters
    return gather(found, modifier_rank=changed_by)


@contextmanager
def gather_fsdp2(modules: Sequence[nn.Module]) -> Iterator[None]:
    """`fully_shard` of torch: the parameters of a unit are DTensors."""
    with ExitStack() as stack:
        for unit in (module for module in modules if isinstance(module, FSDPModule)):
            stack.callback(unit.reshard)
            unit.unshard()
        yield


@contextmanager
def gather_fsdp1(modules: Sequence[nn.Module]) -> Iterator[None]:
    """`FullyShardedDataParallel` of torch: a wrapper around each unit holds its flat parameter."""
    with ExitStack() as stack:
        # The outermost comes first: the first unit that is used takes itself for the root.
        for unit in fsdp1_units(modules):
            held = type(unit).summon_full_params(unit, recurse=False, writeback=False)
            stack.enter_context(held)
        yield


def fsdp1_units(modules: Iterable[nn.Module]) -> list[Any]:
    return [module for module in modules if isinstance(module, FullyShardedDataParallel)]


def gather_of(model: nn.Module) -> Gather | None:
    """How the engine that shards the weights of a model gathers them; None if they are whole."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return gather_zero3
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return gather_fsdp2
    return gather_fsdp1 if fsdp1_units(model.modules()) else None


@contextmanager
def gathered(model: nn.Module, at_once: bool = True) -> Iterator[None]:
    """Let a model whose weights may be sharded compute as if they were whole.

    All ranks must enter and leave together. `at_once`, each holds all weights, and may compute what
    and when it wants; otherwise what is outside the layers (embeddings, last norm, output
    projection), and a layer while it runs. All ranks must then run the layers equally often.
    """
    gather = gather_of(model)
    if gather is None:
        yield
        return
    layers = [] if at_once else list(layers_of(model))
    inside = {module for layer in layers for module in layer.modules()}
    with ExitStack() as stack:
        stack.enter_context(_without_hooks(model))
        for unit in fsdp1_units(model.modules()):
            stack.enter_context(replaced_forward(unit, unit.module.__call__))
        stack.enter_context(gather([m for m in model.modules() if m not in inside]))
        for layer in layers:
            forward = gather([*layer.modules()])(layer.forward)
            stack.enter_context(replaced_forward(layer, forward))
        yield


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that run one after the other: members of lists that are in no other list."""
    for child in model.children():
        yield from child if isinstance(child, nn.ModuleList) else layers_of(child)


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let calls of `module` run `forward`, between hooks that fire as usual."""
    own = {name: value for name, value in vars(module).items() if name == "forward"}
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        vars(module).update(own)


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Take away the hooks around forwards that engines have put on modules."""
    both = [hooks for module in model.modules() for hooks in forward_hooks(module)]
    kept: list[tuple[Any, Any]] = [(hooks, dict(hooks)) for hooks in both if hooks]
    try:
        for hooks, before in kept:
            for key, hook in before.items():
                if str(getattr(hook, "__module__", "")).startswith(PACKAGES):
                    del hooks[key]
        yield
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)


def whole(parameter: Tensor) -> Tensor:
    """The full tensor of a parameter that FSDP2 may have sharded; a collective if it has."""
    value: Any = parameter.detach()
    if hasattr(value, "full_tensor"):
        # Shards offloaded to the host travel through the device that the ranks talk over.
        value = value.to(value.device_mesh.device_type).full_tensor()
    return value


def unwrapped(model: nn.Module) -> Any:
    """The module below those of DDP, FSDP1, DeepSpeed and `torch.compile` around it."""
    # What accelerate has for this takes as long as the forward of a small model.
    found: Any = model
    around: Any = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)
    if "deepspeed" in sys.modules:  # otherwise nothing can be wrapped by it
        around += (require("deepspeed", "DeepSpeed").DeepSpeedEngine,)
    while isinstance(found, around) or module_before_compile(found) is not None:
        found = found.module if isinstance(found, around) else module_before_compile(found)
    return found


def is_sharded(model: nn.Module) -> bool:
    """Whether each rank holds a part of the weights of `model`."""
    return torch.distributed.is_initialized() and gather_of(model) is not None


def release(model: nn.Module) -> None:
    """Give back weights that FSDP leaves whole after a forward, for a backward pass to come."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for unit in fsdp1_units(model.modules()):
        reshard_fsdp1(unit)


def local_shard(parameter: Any) -> Tensor:
    """This rank's part of a parameter, or all of it, to read or to change after `release`."""
    if hasattr(parameter, "ds_id"):
        parameter.ds_active_sub_modules.clear()
        parameter.partition()  # small ones may be whole, and would not notice a change
        return parameter.ds_tensor
    value = parameter.detach()
    return value.to_local() if hasattr(value, "to_local") else value
