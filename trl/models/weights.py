"""Read the full weights of a policy, merged with its adapter; facts about quantized weights."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from ..distributed import Ranks
from ..imports import require
from ..ops.torch_internals import WRAPPER_ATTRIBUTES, non_persistent_buffers
from .sharded import fsdp1_units, gather_fsdp1, gather_of, gather_zero3, unwrapped, whole
from .unwrap import VALUE_MODEL, causal_model, is_peft_model

# Attributes in which wrappers hold the wrapped module.
WRAPPING = (*WRAPPER_ATTRIBUTES, "token_adapter")
Weights = Iterator[tuple[str, Tensor]]


def full_weights(model: nn.Module, with_adapter: bool = True) -> Weights:
    """Yield the name and full tensor of each weight that the policy computes with.

    Names are those of the base model's state dict, persistent buffers included. Of tied weights
    only the first is yielded. Active adapters are merged into copies of one layer at a time, so the
    policy itself never changes, even if iteration stops early. Adapters that are switched off are
    left out, and without `with_adapter` all are. Weights that bitsandbytes holds in 4 bits are
    dequantized, and merged in float32.

    Sharded weights are gathered module by module (FSDP1: unit by unit), so all ranks must iterate
    to the end; a rank that stops early leaves the others waiting. A tensor is valid until the next
    one is requested; do not write to it. `check_weights` runs immediately, not at the first item.
    """
    check_weights(model)
    return _stream(model, [*_blocks(causal_model(model), "", with_adapter)])


def check_weights(model: nn.Module) -> None:
    """Raise a ValueError if a policy cannot be written as full weights."""
    causal = causal_model(model)
    if is_quantized(causal) and not getattr(causal, "is_loaded_in_4bit", False):
        reason = "quantized"
        if getattr(causal, "is_loaded_in_8bit", False):
            reason = "in 8 bits, which round the inputs of its layers as well"
        raise ValueError(
            f"The base model is {reason}, so it cannot be written as whole weights. Load it "
            "in 4 bits (--load_in_4bit), or without quantization."
        )
    wrapper = unwrapped(model)
    if not is_peft_model(wrapper):
        return
    config = wrapper.active_peft_config
    if config.is_prompt_learning:
        raise ValueError(
            f"An adapter of type {config.peft_type.value} adds tokens and cannot be merged into "
            "weights; use LoRA or DoRA."
        )
    if is_quantized(causal) and config.peft_type.value != "LORA":
        raise ValueError(
            f"An adapter of type {config.peft_type.value} cannot be merged into quantized weights; "
            "use LoRA or DoRA, or load the base model without quantization."
        )


class _Block(NamedTuple):
    """A module with its own weights, or an adapter layer with everything inside it."""

    name: str  # in the base model
    module: nn.Module
    adapted: bool


def _blocks(module: nn.Module, name: str, with_adapter: bool = True) -> Iterator[_Block]:
    module = _computing_module(module, with_adapter)
    adapted = is_adapter_layer(module)
    # A layer that only refers to the adapter of a layer it is tied to is skipped.
    if not adapted or getattr(module, "tied_adapter", None) is None:
        yield _Block(name, module, adapted)
    for child_name, child in () if adapted else module.named_children():
        if child_name != VALUE_MODEL:
            path = name if child_name in WRAPPING else f"{name}.{child_name}".removeprefix(".")
            yield from _blocks(child, path, with_adapter)


def _computing_module(module: nn.Module, with_adapter: bool) -> nn.Module:
    """Return the module that computes: inside wrappers of adapters that are switched off.

    With `modules_to_save`, that is the trained copy of the module.
    """
    if is_adapter_layer(module) and (module.disable_adapters or not with_adapter):
        return _computing_module(module.get_base_layer(), with_adapter)
    if not isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict):
        return module
    active = [name for name in module.active_adapters if name in module.modules_to_save]
    if module.disable_adapters or not active:
        return _computing_module(module.original_module, with_adapter)
    return module.modules_to_save[active[0]]


def is_adapter_layer(module: nn.Module) -> bool:
    """Whether a module is a `BaseTunerLayer` of peft; does not import peft."""
    return hasattr(type(module), "get_base_layer")


def adapted_layers(causal: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name in the base model, layer) for each layer with an adapter that is switched on."""
    return ((block.name, block.module) for block in _blocks(causal, "") if block.adapted)


def _stream(model: nn.Module, blocks: list[_Block]) -> Weights:
    gather = gather_of(model)
    seen: set[int] = set()  # ids of the parameters that were yielded
    # For each module, its innermost FSDP1 unit: inner units come later in `modules()`.
    units = {module: unit for unit in fsdp1_units(model.modules()) for module in unit.modules()}
    for owner, members in groupby(blocks, lambda block: units.get(block.module, block.module)):
        owned_blocks = list(members)
        modules = [owner]
        for block in owned_blocks:
            modules += block.module.modules() if block.adapted else [block.module]
        gathering: AbstractContextManager[object] = nullcontext()
        if gather in (gather_zero3, gather_fsdp1):  # `whole` gathers parameters of FSDP2 singly
            gathering = gather([*dict.fromkeys(modules)])
        with gathering:
            for block in owned_blocks:
                yield from _merged(block) if block.adapted else _own_weights(block, seen)


def _own_weights(block: _Block, seen: set[int]) -> Weights:
    for path, parameter in block.module.named_parameters(block.name, recurse=False):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield path, _dense(block.module, path, parameter)
    yield from _buffers(block.name, block.module)


def _buffers(name: str, module: nn.Module) -> Weights:
    for path, buffer in module.named_buffers(name, recurse=False):
        if path.rpartition(".")[2] not in non_persistent_buffers(module):
            yield path, buffer


def _dense(module: nn.Module, path: str, parameter: Tensor, copied: bool = False) -> Tensor:
    """Return a full, dequantized weight; if `copied`, one that may be changed.

    Of a weight in 4 bits the copy is in float32.
    """
    state = quantization_of(module) if path.rpartition(".")[2] == "weight" else None
    if state is None:
        return whole(parameter).clone() if copied else whole(parameter)
    packed = whole(parameter).contiguous().view(torch.uint8).reshape(-1, 1)
    functional = require("bitsandbytes", "a quantized model").functional
    dense: Tensor = functional.dequantize_4bit(packed, state)
    return dense.float() if copied else dense


class _ModuleFunction(nn.Module):
    """Wraps a function that uses a module, for `functional_call` with other weights."""

    def __init__(self, module: nn.Module, function: Callable[[], object]):
        super().__init__()
        self.module = module
        self._function = function

    def forward(self) -> object:
        return self._function()


@torch.no_grad()
def _merged(block: _Block) -> Weights:
    """Yield the weights of an adapter layer, merged in copies."""
    layers = [module for module in block.module.modules() if is_adapter_layer(module)]
    base = layers[0].get_base_layer()
    merged_adapters = [(layer, list(layer.merged_adapters)) for layer in layers]
    # peft's layers for bitsandbytes would quantize the merged weight again.
    requantizes = quantization_of(base) is not None
    merge = require("peft.tuners.lora.layer", "adapters").Linear.merge
    copies: dict[str, Tensor] = {}
    for path, parameter in block.module.named_parameters():
        owner = block.module.get_submodule(path.rpartition(".")[0])
        dense = _dense(owner, path, parameter, copied=True)
        copies[path] = nn.Parameter(dense, requires_grad=False)

    def merge_copies() -> list[tuple[str, Tensor]]:
        try:
            for layer in reversed(layers):  # the innermost holds the weights
                if requantizes:
                    merge(layer)
                else:
                    layer.merge()
            return [(path, p.detach()) for path, p in base.named_parameters(block.name)]
        finally:
            for layer, previous in merged_adapters:
                layer.merged_adapters[:] = previous

    copies = {f"module.{path}": copy for path, copy in copies.items()}
    merged = functional_call(_ModuleFunction(block.module, merge_copies), copies)
    del copies
    yield from merged
    for name, module in base.named_modules(prefix=block.name):
        yield from _buffers(name, module)


def is_quantized(model: nn.Module) -> bool:
    """Whether a transformers model, or the one inside an adapter, has quantized weights."""
    return bool(getattr(model, "is_quantized", False))


def operations_per_token(model: nn.Module) -> int:
    """Estimate the floating-point operations of forward and backward per token: 6 per weight.

    As in transformers, weights of embeddings do not count, even if the output projection shares
    them. Sharded and quantized weights count in full.
    """
    layers = (module for module in model.modules() if isinstance(module, nn.Embedding))
    embeddings = {id(weight) for layer in layers for weight in layer.parameters()}
    return 6 * sum(_entries(p) for p in model.parameters() if id(p) not in embeddings)


def _entries(weight: nn.Parameter) -> int:
    """Return the number of entries of a weight, also if it is sharded or quantized."""
    state = getattr(weight, "quant_state", None)
    shape = getattr(weight, "ds_shape", weight.shape) if state is None else state.shape
    return math.prod(shape)


def check_sharding(model: nn.Module, accelerator: Accelerator) -> None:
    """Raise a ValueError if FSDP cannot shard the quantized weights of a model.

    FSDP1 flattens only floating-point weights; FSDP2 does not support those in 8 bits.
    """
    version = Ranks(accelerator).fsdp_version
    bits = 8 if getattr(model, "is_loaded_in_8bit", False) else 4
    if is_quantized(model) and (version == 1 or (version is not None and bits == 8)):
        raise ValueError(
            f"FSDP{version} cannot shard a base model in {bits} bits. Use 4 bits under "
            "FSDP2 (--accelerate_config fsdp2), or ZeRO-3 (--accelerate_config zero3)."
        )


def keep_trainable(model: nn.Module) -> None:
    """Stop bitsandbytes from converting 4-bit weights for inference in evaluation mode.

    On processors with AVX512-BF16 it does so at the first forward in evaluation mode: scales are
    rounded to bfloat16, and no gradient flows through the layer from then on. Raises a ValueError
    if weights have already been converted, since that cannot be undone exactly.
    """
    for name, module in model.named_modules():
        if getattr(quantization_of(module), "packing_format_for_cpu", False):
            raise ValueError(
                f"bitsandbytes has converted the 4-bit weights of {name} for inference, which "
                "rounds them and stops gradients: the model was run in evaluation mode. Load it "
                "again and pass it to the trainer before it is run, or pass its name."
            )
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def working_precision(causal: PreTrainedModel) -> torch.dtype:
    """Return the dtype of matrix products in layers, which quantization may make coarser."""
    config = getattr(causal.config, "quantization_config", None)
    if getattr(config, "load_in_8bit", False):
        return torch.float16  # inputs are rounded to 8 bits relative to each token's largest
    if getattr(config, "load_in_4bit", False):
        compute_dtype = getattr(config, "bnb_4bit_compute_dtype", None)
        if compute_dtype is not None:
            return compute_dtype
    return causal.dtype


def quantization_of(module: nn.Module) -> Any:
    """Return the `QuantState` of a module's weight that bitsandbytes holds in 4 bits, or None."""
    state = getattr(getattr(module, "weight", None), "quant_state", None)
    # Sharding engines replace the parameter of bitsandbytes, but the module has the state, too.
    return state if state is not None else getattr(module, "quant_state", None)
