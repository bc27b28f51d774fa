"""The reference policy of the KL penalty: a frozen copy, or the policy without its adapter."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedType
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import distribute_tensor
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import deepspeed_config

from ..imports import require
from .patches import prepare_untracked
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
# Values of init_lora_weights that subtract the adapter's initial value from the base weights.
CHANGING_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Entries of a DeepSpeed configuration that concern training only.
TRAINING = ("optimizer", "scheduler", "train_batch_size", "gradient_accumulation_steps")


def create_reference_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a frozen copy of `model`, edits in memory included, in evaluation mode.

    Weights that ZeRO-3 has partitioned are partitioned in the copy, too; all ranks must then call
    this.
    """
    frozen = copy.deepcopy(model)
    if gather_of(model) is gather_zero3:
        modules = list(zip(model.modules(), frozen.modules(), strict=True))
        # Children first, because `zero.Init` partitions a module with all of its children.
        for source, module in reversed(modules):
            _copy_partitioned(source, module)
    return frozen.requires_grad_(False).eval()


def _copy_partitioned(source: nn.Module, module: nn.Module) -> None:
    """Give a copied module the parameters that ZeRO-3 has partitioned in the source."""
    own = module.named_parameters(recurse=False)
    missing = [(name, parameter) for name, parameter in own if not hasattr(parameter, "ds_id")]
    with gathered_parameters(source.parameters(recurse=False)):
        for name, parameter in missing:
            parameter.data = source.get_parameter(name).data.clone()
    if missing:
        zero = require("deepspeed", "ZeRO-3").zero
        zero.Init(module=module, config_dict_or_path=deepspeed_config())


class FrozenCopy:
    """A separate frozen model: a copy of the policy, or a model that only serves as reference."""

    def __init__(self, model: PreTrainedModel):
        self.model = model.requires_grad_(False).eval()

    def prepare(self, accelerator: Accelerator) -> Self:
        """Move the copy to the device of the policy, and shard it like the policy."""
        engine = accelerator.distributed_type
        if engine == DistributedType.DEEPSPEED:
            self.model = _deepspeed(self.model, accelerator.state.deepspeed_plugin)
        elif engine != DistributedType.FSDP:
            self.model = self.model.to(accelerator.device)
        elif accelerator.is_fsdp2:
            self.model = fsdp2_prepare_model(accelerator, self.model)
        else:
            plugin = accelerator.state.fsdp_plugin
            param_init_fn = plugin.param_init_fn
            self.model = prepare_untracked(accelerator, self.model)
            # accelerate has set this to tie weights as in the copy; it must not tie the policy's.
            plugin.param_init_fn = param_init_fn
        return self

    @contextmanager
    def active(self, policy: nn.Module | None = None) -> Iterator[nn.Module]:
        """Yield the frozen copy; the policy is not used."""
        yield self.model


class AdapterOff:
    """The policy itself, with a frozen adapter in place of its own, or without adapter."""

    def __init__(self, model: nn.Module, adapter: str | None = None):
        self.model = model
        self.adapter = adapter

    def prepare(self, accelerator: Accelerator) -> Self:
        return self

    @contextmanager
    def active(self, policy: nn.Module | None = None) -> Iterator[nn.Module]:
        """Yield the policy with its adapter switched; the adapter is back afterwards.

        `policy` is the model as it was prepared for training, by default the one without wrappers.
        """
        with _same_trainable(self.model), ExitStack() as stack:
            if self.adapter is None and self.model.active_peft_config.is_prompt_learning:
                # `disable_adapter` would bind the base model's current forward, which the scorer
                # replaces.
                policy = self.model.get_base_model()
            elif self.adapter is None:
                stack.enter_context(self.model.disable_adapter())
            else:
                stack.callback(self.model.set_adapter, self.model.active_adapter)
                self.model.set_adapter(self.adapter, inference_mode=True)
            yield self.model if policy is None else policy


@contextmanager
def _same_trainable(model: nn.Module) -> Iterator[None]:
    """Restore `requires_grad` on exit: switching adapters makes all of the active one trainable."""
    original = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, requires_grad in original:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)


ReferencePolicy = FrozenCopy | AdapterOff


def make_reference(
    model: nn.Module, had_adapter: bool, ref_model: PreTrainedModel | None = None
) -> ReferencePolicy:
    """Make the reference for a policy that is not wrapped yet; a `ref_model` is frozen and used.

    If the user's model already had an adapter, its weights belong to the reference, so they are
    copied into a frozen adapter. The same holds for a new adapter whose initialization changed the
    base weights.
    """
    if ref_model is not None:
        return FrozenCopy(ref_model)
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
    if not had_adapter and not str(start).startswith(CHANGING_STARTS):
        return AdapterOff(model)
    if REFERENCE_ADAPTER in model.peft_config:
        raise ValueError(
            f"The model has an adapter named {REFERENCE_ADAPTER!r}, the name of the frozen copy "
            "that is the reference: remove it with model.delete_adapter, or give it another name."
        )
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # so that the base weights don't change once more
    with _same_trainable(model):
        model.add_adapter(REFERENCE_ADAPTER, config)
        with torch.no_grad():
            for frozen, current in frozen_pairs(model):
                frozen.copy_(current).requires_grad_(False)
    return AdapterOff(model, REFERENCE_ADAPTER)


def frozen_pairs(model: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Yield (frozen, trained) for each weight of the frozen copy of an adapter."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        path = name.split(".")
        if REFERENCE_ADAPTER in path:
            trained = [model.active_adapter if x == REFERENCE_ADAPTER else x for x in path]
            yield parameter, parameters[".".join(trained)]


def _deepspeed(model: nn.Module, plugin: DeepSpeedPlugin) -> nn.Module:
    """Initialize DeepSpeed for a frozen model: the policy's settings without those of training."""
    config = copy.deepcopy(plugin.deepspeed_config)
    zero = config.get("zero_optimization", {})
    zero = {k: v for k, v in zero.items() if not k.startswith("offload_") and v != "auto"}
    config = {k: v for k, v in config.items() if k not in TRAINING and v != "auto"}
    config["zero_optimization"] = zero | {"stage": 3 if plugin.zero_stage == 3 else 0}
    config["train_micro_batch_size_per_gpu"] = 1
    engine, *_ = require("deepspeed", "DeepSpeed").initialize(model=model, config=config)
    return engine.module


@torch.no_grad()
def whole_weights(model: nn.Module, on_first: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield names and full tensors on the host, gathered one at a time; all ranks must iterate.

    FSDP1 gathers all tensors before the first is yielded: on every rank, or only on rank 0 with
    `on_first`, for callers that read the tensors of rank 0 only.
    """
    with _full_states_of_fsdp1(model, on_first):
        state = model.state_dict(keep_vars=True)
    for name in list(state):
        value = state.pop(name)
        with gathered_parameters([value]):
            yield name, whole(value).cpu().clone()


@contextmanager
def _full_states_of_fsdp1(model: nn.Module, on_first: bool) -> Iterator[None]:
    """Let `state_dict` of a model that FSDP1 shards return full weights on the host."""
    if not fsdp1_units(model.modules()):
        yield
        return
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=on_first)
    full = StateDictType.FULL_STATE_DICT
    with FullyShardedDataParallel.state_dict_type(model, full, config):
        yield


@torch.no_grad()
def load_weights(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load what `whole_weights` yielded; each rank must pass all of it."""
    if gather_of(model) in (None, gather_fsdp1):
        model.load_state_dict(state)
        return
    targets: dict[str, Tensor] = model.state_dict(keep_vars=True)
    if targets.keys() != state.keys():
        differing = ", ".join(sorted(targets.keys() ^ state.keys()))
        raise RuntimeError(
            f"The stored reference does not fit the model. Weights that only one has: {differing}."
        )
    for name, target in targets.items():
        value = state[name]
        mesh = getattr(target, "device_mesh", None)
        if mesh is not None:  # shard the value like the target, which FSDP2 has sharded
            value = distribute_tensor(value.to(mesh.device_type), mesh, target.placements)
        with gathered_parameters([target], 0):
            target.data.copy_(value)
