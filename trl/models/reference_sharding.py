"""A model that is only scored with, spread over ranks in the way of the model that is trained."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from ..imports import require
from .sharded import gather_fsdp1, gather_of, gathered_parameters, whole

# Blocks of a DeepSpeed configuration that are about training.
TRAINING = ("optimizer", "scheduler", "train_batch_size", "gradient_accumulation_steps")


def copy_weights(model: nn.Module) -> Any:
    """Copy a model; one whose weights ZeRO-3 has partitioned is copied module by module."""
    found = copy.deepcopy(model)
    if not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return found
    from transformers.integrations.deepspeed import deepspeed_config

    zero = require("deepspeed", "ZeRO-3").zero
    sources = dict(model.named_modules())
    # Children first, because `Init` looks at a module with all that is below it.
    for name, module in reversed(list(found.named_modules())):
        own = dict(module.named_parameters(recurse=False))
        own = {key: value for key, value in own.items() if not hasattr(value, "ds_id")}
        known = dict(sources[name].named_parameters(recurse=False))
        with gathered_parameters(known.values()):
            for key, parameter in own.items():
                parameter.data = known[key].data.clone()
        if own:
            zero.Init(module=module, config_dict_or_path=deepspeed_config())
    return found


def spread(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Put a frozen model where the policy is going to be, sharded if the policy will be.

    Args:
        model: not yet prepared by anything; changed in place.
        accelerator (`Accelerator`): of the trainer.
    """
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        return _deepspeed(model, accelerator.state.deepspeed_plugin)
    if kind != DistributedType.FSDP:
        return model.to(accelerator.device)
    if accelerator.is_fsdp2:
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        return fsdp2_prepare_model(accelerator, model)
    return _fsdp1(model, accelerator)


def _deepspeed(model: nn.Module, plugin: Any) -> nn.Module:
    """An engine for inference, partitioned only where the policy is."""
    config = copy.deepcopy(plugin.deepspeed_config)
    zero = config.get("zero_optimization", {})
    stage = 3 if plugin.zero_stage == 3 else 0
    zero = {k: v for k, v in zero.items() if not k.startswith("offload_") and v != "auto"}
    config = {k: v for k, v in config.items() if k not in TRAINING and v != "auto"}
    config["zero_optimization"] = zero | {"stage": stage}
    config["train_micro_batch_size_per_gpu"] = 1
    engine, *_ = require("deepspeed", "DeepSpeed").initialize(model=model, config=config)
    return engine.module


def _fsdp1(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Wrap as accelerate wraps the policy; it would also save what it prepares itself."""
    from accelerate.utils.fsdp_utils import ensure_weights_retied
    from torch.distributed.fsdp import FullyShardedDataParallel

    plugin = accelerator.state.fsdp_plugin
    plugin.set_auto_wrap_policy(model)
    return FullyShardedDataParallel(
        model,
        sharding_strategy=plugin.sharding_strategy or plugin.reshard_after_forward,
        auto_wrap_policy=plugin.auto_wrap_policy,
        mixed_precision=plugin.mixed_precision_policy,
        sync_module_states=plugin.sync_module_states,
        use_orig_params=plugin.use_orig_params,
        param_init_fn=ensure_weights_retied(plugin.param_init_fn, model, accelerator.device),
        limit_all_gathers=plugin.limit_all_gathers,
        device_id=accelerator.device,
    )


@torch.no_grad()
def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and full tensors in main memory, one gathered at a time; all ranks must go on alike."""
    with _named_as_trained(model):
        for name, value in model.state_dict(keep_vars=True).items():
            with gathered_parameters([value]):
                yield name, whole(value).cpu().clone()


@torch.no_grad()
def load_weights(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Put in what `whole_weights` gave; every rank has all of it.

    Raises:
        RuntimeError: if a name is missing or unknown, or a shape is another.
    """
    if gather_of(model) in (None, gather_fsdp1):
        with _named_as_trained(model):
            model.load_state_dict(state)
        return
    targets: dict[str, Any] = model.state_dict(keep_vars=True)
    if targets.keys() != state.keys():
        differing = ", ".join(sorted(targets.keys() ^ state.keys()))
        raise RuntimeError(f"The stored reference has other weights than the model: {differing}.")
    for name, target in targets.items():
        with gathered_parameters([target], 0):
            target.data.copy_(_like(state[name], target))


def _named_as_trained(model: nn.Module) -> AbstractContextManager[Any]:
    """Let states of the old FSDP be full tensors under the names of the model itself."""
    if gather_of(model) is not gather_fsdp1:
        return nullcontext()
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    return FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT)


def _like(value: Tensor, target: Any) -> Any:
    """Cut a full tensor as FSDP2 has cut the target."""
    if not hasattr(target, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh = target.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, target.placements)
