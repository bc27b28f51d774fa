"""Weights of which each rank holds a part: DeepSpeed ZeRO-3, FSDP1, FSDP2.

Training leaves it to hooks of these engines when a module's weights are gathered. In here the hooks
are off, so that nothing communicates but what is written here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..imports import require


class ShardedEngine(Protocol):
    """What an engine that shards weights can do. All ranks must call it alike."""

    def gather(self, modules: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Hold the whole weights that belong to modules themselves, not to their children."""
        ...

    def bypass(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Let the modules of `model` compute without communicating."""
        ...


class Zero3:
    """DeepSpeed ZeRO-3: each parameter is partitioned."""

    def gather(self, modules: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Hold whole weights; see `ShardedEngine`."""
        parameters = [p for m in modules for p in m.parameters(recurse=False)]
        for parameter in parameters:
            # Marks that a forward without backward left would forbid to partition it again.
            getattr(parameter, "ds_active_sub_modules", set()).clear()
        gathered: AbstractContextManager[Any] = require(
            "deepspeed", "ZeRO-3"
        ).zero.GatheredParameters(parameters)
        return gathered

    def bypass(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Switch communication off; see `ShardedEngine`."""
        return _without_hooks(model, "deepspeed")


class FSDP2:
    """`fully_shard` of torch: the parameters of a unit are DTensors."""

    @contextmanager
    def gather(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Hold whole weights; see `ShardedEngine`."""
        from torch.distributed.fsdp import FSDPModule

        units = [module for module in modules if isinstance(module, FSDPModule)]
        try:
            for unit in units:
                unit.unshard()
            yield
        finally:
            for unit in units:
                unit.reshard()

    def bypass(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Switch communication off; see `ShardedEngine`."""
        return _without_hooks(model, "torch.distributed.fsdp")


class FSDP1:
    """`FullyShardedDataParallel` of torch: a wrapper around each unit holds its flat parameter."""

    @contextmanager
    def gather(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Hold whole weights; see `ShardedEngine`."""
        from torch.distributed.fsdp import FullyShardedDataParallel as Unit

        with ExitStack() as stack:
            # The outermost comes first: the first unit that is used takes itself for the root.
            for unit in (module for module in modules if isinstance(module, Unit)):
                stack.enter_context(Unit.summon_full_params(unit, recurse=False, writeback=False))
            yield

    @contextmanager
    def bypass(self, model: nn.Module) -> Iterator[None]:
        """Switch communication off; see `ShardedEngine`."""
        from torch.distributed.fsdp import FullyShardedDataParallel as Unit

        with ExitStack() as stack:
            for unit in (module for module in model.modules() if isinstance(module, Unit)):
                stack.enter_context(replaced_forward(unit, unit.module.__call__))
            yield


def sharded_engine(model: nn.Module) -> ShardedEngine | None:
    """The engine that shards the weights of a model, as its modules and parameters show."""
    if not torch.distributed.is_available():
        return None
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return Zero3()
    if _has(model, FSDPModule):
        return FSDP2()
    return FSDP1() if _has(model, FullyShardedDataParallel) else None


def _has(model: nn.Module, kind: type) -> bool:
    return any(isinstance(module, kind) for module in model.modules())


@contextmanager
def gathered(model: nn.Module, at_once: bool = True) -> Iterator[None]:
    """Let a model whose weights are sharded compute as if they were whole.

    All ranks must enter and leave together. In between:

    - `at_once=True`: each rank holds all weights, and may compute what and when it wants.
    - `at_once=False`: each rank holds what is outside the layers (embeddings, last norm, output
      projection); a layer is gathered while it runs. All ranks must run the layers equally often.

    Does nothing if weights are not sharded.

    Args:
        model: as it was prepared for training, wrappers included.
        at_once (`bool`): see above.
    """
    engine = sharded_engine(model)
    if engine is None:
        yield
        return
    layers = [] if at_once else list(layers_of(model))
    inside = {module for layer in layers for module in layer.modules()}
    with ExitStack() as stack:
        stack.enter_context(engine.bypass(model))
        stack.enter_context(engine.gather([m for m in model.modules() if m not in inside]))
        for layer in layers:
            stack.enter_context(replaced_forward(layer, _gathering(layer, engine)))
        yield


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that run one after the other: members of lists that are in no other list."""
    for child in model.children():
        yield from child if isinstance(child, nn.ModuleList) else layers_of(child)


def _gathering(layer: nn.Module, engine: ShardedEngine) -> Callable[..., Any]:
    modules, compute = list(layer.modules()), layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with engine.gather(modules):
            return compute(*args, **kwargs)

    return forward


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let calls of `module` run `forward`, between hooks that fire as usual."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own


@contextmanager
def _without_hooks(model: nn.Module, package: str) -> Iterator[None]:
    """Take away the hooks around forwards that a package has put on modules."""
    kept: list[tuple[Any, Any]] = []
    try:
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                if any(_is_of(hook, package) for hook in hooks.values()):
                    kept.append((hooks, dict(hooks)))
                    others = {key: h for key, h in hooks.items() if not _is_of(h, package)}
                    hooks.clear()
                    hooks.update(others)
        yield
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)


def _is_of(hook: Any, package: str) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(package)


def whole(parameter: Tensor) -> Tensor:
    """The full tensor of a parameter that FSDP2 may have sharded; a collective if it has."""
    value: Any = parameter.detach()
    if not hasattr(value, "full_tensor"):
        return parameter.detach()
    # Shards offloaded to the host travel through the device that the ranks talk over.
    full: Tensor = value.to(value.device_mesh.device_type).full_tensor()
    return full


def unwrapped(model: nn.Module) -> Any:
    """The module below those of DDP, FSDP1, DeepSpeed and `torch.compile` around it.

    What accelerate has for this reads the metadata of packages at each call, which takes as long as
    the forward of a small model.
    """
    around: tuple[type, ...] = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FullyShardedDataParallel

        around += (FullyShardedDataParallel,)
    if "deepspeed" in sys.modules:  # otherwise nothing can be wrapped by it
        around += (require("deepspeed", "DeepSpeed").DeepSpeedEngine,)
    found: Any = model
    while isinstance(found, around) or hasattr(found, "_orig_mod"):
        found = getattr(found, "module" if isinstance(found, around) else "_orig_mod")
    return found


def is_fsdp1(model: nn.Module) -> bool:
    """Whether `model` is a wrapper of the old FSDP."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(model, FullyShardedDataParallel)


def original_class(kind: type) -> type:
    """The class that `fully_shard` has derived another one from; `kind` itself otherwise."""
    from torch.distributed.fsdp import FSDPModule

    return kind.__mro__[2] if issubclass(kind, FSDPModule) else kind


def is_sharded(model: nn.Module) -> bool:
    """Whether each rank holds a part of the weights of `model`."""
    return torch.distributed.is_initialized() and sharded_engine(model) is not None


def release(model: nn.Module) -> None:
    """Give back weights that FSDP leaves whole after a forward, for a backward pass to come."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.fsdp._runtime_utils import _reshard

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, FullyShardedDataParallel):
            handle = module._handle
            if handle is not None and handle.uses_sharded_strategy:  # it is not on one process
                _reshard(module, handle, True)


def local_shard(parameter: Any) -> Tensor:
    """This rank's part of a parameter, to read or to change; all of one that is not sharded.

    The model must have been through `release`.
    """
    if hasattr(parameter, "ds_id"):
        parameter.ds_active_sub_modules.clear()
        parameter.partition()  # small ones may be whole, and would not notice a change
        return parameter.ds_tensor
    value = parameter.detach()
    return value.to_local() if hasattr(value, "to_local") else value
