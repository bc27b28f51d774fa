"""The reference policy of the KL penalty: a frozen copy, or the policy without its adapter."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import distribute_tensor
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import deepspeed_config

from ..imports import require
from .patches import prepare_apart
from .sharded import (
    fsdp1_units,
    gather_fsdp1,
    gather_of,
    gather_zero3,
    gathered_parameters,
    whole,
)
from .unwrap import is_peft_model

REFERENCE_ADAPTER = "ref"
# Values of init_lora_weights that take what the adapter starts with out of the base weights.
CHANGING_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Blocks of a DeepSpeed configuration that are about training.
TRAINING = ("optimizer", "scheduler", "train_batch_size", "gradient_accumulation_steps")


def create_reference_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a frozen copy of `model`, edits in memory included, in evaluation mode.

    Weights that ZeRO-3 has partitioned stay so, and every process must call this.
    """
    found = copy.deepcopy(model)
    modules = zip(model.modules(), found.modules(), strict=True)
    # Children first, because `Init` looks at a module with all that is below it.
    for source, module in reversed([*modules] if gather_of(model) is gather_zero3 else []):
        own = module.named_parameters(recurse=False)
        missing = [(name, parameter) for name, parameter in own if not hasattr(parameter, "ds_id")]
        with gathered_parameters(source.parameters(recurse=False)):
            for name, parameter in missing:
                parameter.data = source.get_parameter(name).data.clone()
        if missing:
            zero = require("deepspeed", "ZeRO-3").zero
            zero.Init(module=module, config_dict_or_path=deepspeed_config())
    return found.requires_grad_(False).eval()


class FrozenCopy:
    """A separate frozen model: a copy, or one that nobody else uses."""

    def __init__(self, model: PreTrainedModel):
        self.model = model.requires_grad_(False).eval()

    def prepare(self, accelerator: Accelerator) -> Self:
        """Move the copy to where the policy will train, sharded as the policy will be."""
        kind, state = accelerator.distributed_type, accelerator.state
        if kind == DistributedType.DEEPSPEED:
            self.model = _deepspeed(self.model, state.deepspeed_plugin)
        elif kind != DistributedType.FSDP:
            self.model = self.model.to(accelerator.device)
        elif accelerator.is_fsdp2:
            self.model = fsdp2_prepare_model(accelerator, self.model)
        else:
            start = state.fsdp_plugin.param_init_fn
            self.model = prepare_apart(accelerator, self.model)
            # Accelerate would later tie the policy's weights as those of the copy are tied.
            state.fsdp_plugin.param_init_fn = start
        return self

    @contextmanager
    def active(self, policy: nn.Module | None = None) -> Iterator[nn.Module]:
        """Yield the model to score with, whatever the policy is wrapped in."""
        yield self.model


class AdapterOff:
    """The policy itself, with a frozen adapter in place of its own, or with none."""

    def __init__(self, model: nn.Module, adapter: str | None = None):
        self.model = model
        self.adapter = adapter

    def prepare(self, accelerator: Accelerator) -> Self:
        return self

    @contextmanager
    def active(self, policy: nn.Module | None = None) -> Iterator[nn.Module]:
        """Yield the policy, as it was prepared for training; its adapter is back afterwards."""
        with _same_trainable(self.model), ExitStack() as stack:
            if self.adapter is None and self.model.active_peft_config.is_prompt_learning:
                policy = self.model.get_base_model()  # peft would call its forward of this moment
            elif self.adapter is None:
                stack.enter_context(self.model.disable_adapter())
            else:
                stack.callback(self.model.set_adapter, self.model.active_adapter)
                self.model.set_adapter(self.adapter, inference_mode=True)
            yield self.model if policy is None else policy


@contextmanager
def _same_trainable(model: nn.Module) -> Iterator[None]:
    """Switching adapters makes all of the active one trainable; leave what was frozen so."""
    known = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, flag in known:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)


ReferencePolicy = FrozenCopy | AdapterOff


def make_reference(
    model: nn.Module, brought_adapter: bool, given: PreTrainedModel | None = None
) -> ReferencePolicy:
    """Choose the reference for a policy that is not wrapped yet; one that is `given` is frozen.

    The weights of an adapter that the caller brought belong to the reference, so they are copied
    into a frozen one. So are those of an adapter whose start has changed the base weights.
    """
    if given is not None:
        return FrozenCopy(given)
    if not is_peft_model(model):
        return FrozenCopy(create_reference_model(model))
    config = copy.copy(model.peft_config[model.active_adapter])
    bias = getattr(config, "bias", "none")
    if bias != "none":
        raise ValueError(
            f"bias={bias!r} trains biases of the base model, so no reference is left for the KL "
            "penalty: use bias='none' in the adapter's configuration, or beta=0."
        )
    start = getattr(config, "init_lora_weights", True)
    if not brought_adapter and not str(start).startswith(CHANGING_STARTS):
        return AdapterOff(model)
    if REFERENCE_ADAPTER in model.peft_config:
        raise ValueError(
            f"The model has an adapter named {REFERENCE_ADAPTER!r}, the name of the frozen copy "
            "that is the reference: remove it with model.delete_adapter, or give it another name."
        )
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # not one that changes the base weights once more
    with _same_trainable(model):
        model.add_adapter(REFERENCE_ADAPTER, config)
        with torch.no_grad():
            for frozen, current in frozen_pairs(model):
                frozen.copy_(current).requires_grad_(False)
    return AdapterOff(model, REFERENCE_ADAPTER)


def frozen_pairs(model: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Each weight of the frozen copy of an adapter, with the trained weight it is a copy of."""
    states = dict(model.named_parameters())
    for name, parameter in states.items():
        parts = name.split(".")
        if REFERENCE_ADAPTER in parts:
            own = [model.active_adapter if part == REFERENCE_ADAPTER else part for part in parts]
            yield parameter, states[".".join(own)]


def _deepspeed(model: nn.Module, plugin: Any) -> nn.Module:
    config = copy.deepcopy(plugin.deepspeed_config)
    zero = config.get("zero_optimization", {}).items()
    config = {k: v for k, v in config.items() if k not in TRAINING and v != "auto"}
    kept = {k: v for k, v in zero if not k.startswith("offload_") and v != "auto"}
    config["zero_optimization"] = kept | {"stage": 3 if plugin.zero_stage == 3 else 0}
    config["train_micro_batch_size_per_gpu"] = 1
    engine, *_ = require("deepspeed", "DeepSpeed").initialize(model=model, config=config)
    return engine.module


@torch.no_grad()
def whole_weights(model: nn.Module, on_first: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Names and full tensors in main memory, one gathered at a time; all ranks must iterate.

    FSDP1 gathers all of them before the first: on every rank, or `on_first`, where only that of
    rank 0 is read.
    """
    with _full_states_of_fsdp1(model, on_first):
        state = model.state_dict(keep_vars=True)
    for name in list(state):
        value = state.pop(name)
        with gathered_parameters([value]):
            yield name, whole(value).cpu().clone()


@contextmanager
def _full_states_of_fsdp1(model: nn.Module, on_first: bool) -> Iterator[None]:
    """Let `state_dict` of a model that FSDP1 shards put whole weights into main memory."""
    if not fsdp1_units(model.modules()):
        yield
        return
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=on_first)
    kind = StateDictType.FULL_STATE_DICT
    with FullyShardedDataParallel.state_dict_type(model, kind, config):
        yield


@torch.no_grad()
def load_weights(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load what `whole_weights` yielded; every rank has all of it."""
    if gather_of(model) in (None, gather_fsdp1):
        model.load_state_dict(state)
        return
    targets: dict[str, Any] = model.state_dict(keep_vars=True)
    if targets.keys() != state.keys():
        differing = ", ".join(sorted(targets.keys() ^ state.keys()))
        raise RuntimeError(f"Weights of the model or of the stored reference alone: {differing}.")
    for name, target in targets.items():
        value = state[name]
        if (mesh := getattr(target, "device_mesh", None)) is not None:  # cut as FSDP2 has cut it
            value = distribute_tensor(value.to(mesh.device_type), mesh, target.placements)
        with gathered_parameters([target], 0):
            target.data.copy_(value)
