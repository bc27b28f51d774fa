"""Sharded weights (DeepSpeed ZeRO-3, FSDP1, FSDP2): gather, read and release them.

In training, hooks of these engines gather a module's weights. The functions here switch those hooks
off, so that only their own collectives run.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from ..imports import require
from ..ops.torch_internals import forward_hooks, module_before_compile, reshard_fsdp1

# A context manager, also usable as a decorator, in which the weights that modules own directly,
# not those of their children, are gathered.
Gather = Callable[[Sequence[nn.Module]], Any]
# Packages whose forward hooks communicate.
PACKAGES = ("deepspeed", "torch.distributed.fsdp")


@contextmanager
def gather_zero3(modules: Sequence[nn.Module]) -> Iterator[None]:
    """DeepSpeed ZeRO-3: each parameter is partitioned."""
    with gathered_parameters(p for m in modules for p in m.parameters(recurse=False)):
        yield


def gathered_parameters(
    parameters: Iterable[Tensor], changed_by: int | None = None
) -> AbstractContextManager[object]:
    """Gather parameters that ZeRO-3 has partitioned; changes by rank `changed_by` are kept."""
    partitioned = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not partitioned:
        return nullcontext()
    for parameter in partitioned:
        # A forward without backward leaves marks that would prevent partitioning it again.
        parameter.ds_active_sub_modules.clear()
    gather = require("deepspeed", "ZeRO-3").zero.GatheredParameters
    gathering: AbstractContextManager[object] = gather(partitioned, modifier_rank=changed_by)
    return gathering


@contextmanager
def gather_fsdp2(modules: Sequence[nn.Module]) -> Iterator[None]:
    """FSDP2, torch's `fully_shard`: the parameters of a unit are DTensors."""
    with ExitStack() as stack:
        for unit in (module for module in modules if isinstance(module, FSDPModule)):
            stack.callback(unit.reshard)
            unit.unshard()
        yield


@contextmanager
def gather_fsdp1(modules: Sequence[nn.Module]) -> Iterator[None]:
    """FSDP1, `FullyShardedDataParallel`: a wrapper around each unit holds its flat parameter."""
    with ExitStack() as stack:
        # The outermost unit comes first: the first unit that is used becomes the root.
        for unit in fsdp1_units(modules):
            full_params = type(unit).summon_full_params(unit, recurse=False, writeback=False)
            stack.enter_context(full_params)
        yield


def fsdp1_units(modules: Iterable[nn.Module]) -> list[FullyShardedDataParallel]:
    return [module for module in modules if isinstance(module, FullyShardedDataParallel)]


def gather_of(model: nn.Module) -> Gather | None:
    """Return the gather function for the engine that shards a model; None if it is not sharded."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return gather_zero3
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return gather_fsdp2
    return gather_fsdp1 if fsdp1_units(model.modules()) else None


@contextmanager
def gathered(model: nn.Module, at_once: bool = True) -> Iterator[None]:
    """Gather sharded weights inside, so that each rank can run the model by itself.

    All ranks must enter and leave together. With `at_once` each rank holds all weights and runs
    forwards independently. Otherwise it holds what is outside the layers (embeddings, last norm,
    output projection) and gathers each layer while it runs; all ranks must then run the layers
    equally often.
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
    """Yield the layers of a model: members of module lists that are not inside another list."""
    for child in model.children():
        yield from child if isinstance(child, nn.ModuleList) else layers_of(child)


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let calls of `module` run `forward` inside; hooks fire as usual."""
    attributes = vars(module)
    had_own = "forward" in attributes
    previous = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        del attributes["forward"]
        if had_own:
            attributes["forward"] = previous


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Remove the forward hooks of sharding engines from all modules inside."""
    all_hooks = [hooks for module in model.modules() for hooks in forward_hooks(module) if hooks]
    originals = [(hooks, dict(hooks)) for hooks in all_hooks]
    try:
        for hooks, original in originals:
            for key, hook in original.items():
                if str(getattr(hook, "__module__", "")).startswith(PACKAGES):
                    del hooks[key]
        yield
    finally:
        for hooks, original in originals:
            hooks.clear()
            hooks.update(original)


def whole(parameter: Tensor) -> Tensor:
    """Return the full tensor of a parameter; a collective operation if FSDP2 has sharded it."""
    value = parameter.detach()
    if hasattr(value, "full_tensor"):
        # Shards offloaded to the host are gathered through the device of the process group.
        value = value.to(value.device_mesh.device_type).full_tensor()
    return value


def unwrapped(model: nn.Module) -> Any:
    """Return the module inside wrappers of DDP, FSDP1, DeepSpeed and `torch.compile`."""
    # accelerate's function for this takes as long as the forward of a small model.
    wrappers: tuple[type[nn.Module], ...] = (
        nn.parallel.DistributedDataParallel,
        nn.DataParallel,
        FullyShardedDataParallel,
    )
    if "deepspeed" in sys.modules:  # otherwise nothing can be wrapped by it
        wrappers += (sys.modules["deepspeed"].DeepSpeedEngine,)
    while True:
        if isinstance(model, wrappers):
            model = model.module
            continue
        compiled = module_before_compile(model)
        if compiled is None:
            return model
        model = compiled


def is_sharded(model: nn.Module) -> bool:
    """Whether each rank holds only a shard of the weights of `model`."""
    return torch.distributed.is_initialized() and gather_of(model) is not None


def release(model: nn.Module) -> None:
    """Free weights that FSDP keeps gathered after a forward, in case a backward pass follows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for unit in fsdp1_units(model.modules()):
        reshard_fsdp1(unit)


def local_shard(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter, to read or change; call `release` before.

    That is the whole parameter if it is not sharded.
    """
    if hasattr(parameter, "ds_id"):
        parameter.ds_active_sub_modules.clear()
        # ZeRO-3 may keep small parameters gathered, which would not see a change of the shard.
        parameter.partition()
        return parameter.ds_tensor
    value = parameter.detach()
    return value.to_local() if hasattr(value, "to_local") else value
