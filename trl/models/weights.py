"""The weights of a policy: whole and merged with its adapter, or the adapter's factors apart."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..distributed import Ranks
from ..imports import require
from ..torch_internals import WRAPPER_ATTRIBUTES, non_persistent_buffers
from .sharded import fsdp1_units, gather_fsdp1, gather_of, gather_zero3, unwrapped, whole
from .unwrap import VALUE_MODEL, causal_model, is_peft_model

# Modules that only hold another one, by the attribute in which they do.
WRAPPING = (*WRAPPER_ATTRIBUTES, "token_adapter")
Weights = Iterator[tuple[str, Tensor]]


def full_weights(model: nn.Module, with_adapter: bool = True) -> Weights:
    """Yield each weight of the policy as it computes: name and whole tensor.

    Names are those of the base model's state dict, persistent buffers included; of tied weights the
    first is yielded. Active adapters are merged into copies of one layer at a time, so the policy
    never changes, whenever iteration ends. An adapter that is switched off is left out, and all are
    without `with_adapter`. Weights that bitsandbytes holds in 4 bits are dequantized, and merged in
    float32.

    Sharded weights are gathered module by module (FSDP1: unit by unit), so all ranks must go
    through all of them; a rank that stops early leaves the others waiting. A tensor is valid until
    the next one is asked for; do not write to it. `check_weights` is called at once.
    """
    check_weights(model)
    return _stream(model, [*_blocks(causal_model(model), "", with_adapter)])


def check_weights(model: nn.Module) -> None:
    """Refuse policies that cannot be written as whole weights."""
    causal = causal_model(model)
    if is_quantized(causal) and not getattr(causal, "is_loaded_in_4bit", False):
        rounds = "in 8 bits, which round the inputs of its layers as well"
        kind = rounds if getattr(causal, "is_loaded_in_8bit", False) else "quantized"
        raise ValueError(
            f"The base model is {kind}, so it cannot be written as whole weights. Load it "
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
    """A module with its own weights, or a layer with an adapter and all that is in it."""

    name: str  # in the base model
    module: Any
    adapted: bool


def _blocks(module: Any, name: str, with_adapter: bool = True) -> Iterator[_Block]:
    module = _chosen(module, with_adapter)
    adapted = _is_adapted(module)
    # The first of tied layers brings the adapter of all.
    if not adapted or getattr(module, "tied_adapter", None) is None:
        yield _Block(name, module, adapted)
    for child_name, child in () if adapted else module.named_children():
        if child_name != VALUE_MODEL:
            path = name if child_name in WRAPPING else f"{name}.{child_name}".removeprefix(".")
            yield from _blocks(child, path, with_adapter)


def _chosen(module: Any, with_adapter: bool) -> Any:
    """What computes in the place of a module that an adapter wraps, if one thing does."""
    if _is_adapted(module) and (module.disable_adapters or not with_adapter):
        return _chosen(module.get_base_layer(), with_adapter)
    # With `modules_to_save` an adapter trains copies of the whole module.
    if not isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict):
        return module
    active = [name for name in module.active_adapters if name in module.modules_to_save]
    if module.disable_adapters or not active:
        return _chosen(module.original_module, with_adapter)
    return module.modules_to_save[active[0]]


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(type(module), "get_base_layer")  # a `BaseTunerLayer` of peft


def adapted_layers(causal: nn.Module) -> Iterator[tuple[str, Any]]:
    """Each layer with an adapter that is switched on, and its name in the base model."""
    return ((block.name, block.module) for block in _blocks(causal, "") if block.adapted)


def _stream(model: nn.Module, blocks: list[_Block]) -> Weights:
    gather, seen = gather_of(model), set[int]()
    # For each module, the innermost unit of FSDP1 it belongs to: inner units come later.
    owners = {m: unit for unit in fsdp1_units(model.modules()) for m in unit.modules()}
    for owner, run in groupby(blocks, lambda block: owners.get(block.module, block.module)):
        span, modules = list(run), [owner]
        for block in span:
            modules += block.module.modules() if block.adapted else [block.module]
        # `whole` gathers the parameters of FSDP2 one by one.
        together = gather in (gather_zero3, gather_fsdp1)
        with gather([*dict.fromkeys(modules)]) if gather and together else nullcontext():
            for block in span:
                yield from _merged(block) if block.adapted else _own(block, seen)


def _own(block: _Block, seen: set[int]) -> Weights:
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
    """A whole weight of a module; to be changed if it is `copied`, with more digits than 4 bits."""
    state = quantization_of(module) if path.rpartition(".")[2] == "weight" else None
    if state is None:
        return whole(parameter).clone() if copied else whole(parameter)
    packed = whole(parameter).contiguous().view(torch.uint8).reshape(-1, 1)
    functional = require("bitsandbytes", "a quantized model").functional
    dense: Tensor = functional.dequantize_4bit(packed, state)
    return dense.float() if copied else dense


class _Work(nn.Module):
    """Calls a function that uses a module, so that `functional_call` gives it other weights."""

    def __init__(self, module: nn.Module, work: Callable[[], Any]):
        super().__init__()
        self.module = module
        self._work = work

    def forward(self) -> Any:
        return self._work()


@torch.no_grad()
def _merged(block: _Block) -> Weights:
    layers = [m for m in block.module.modules() if _is_adapted(m)]
    base = layers[0].get_base_layer()
    states = [(layer, list(layer.merged_adapters)) for layer in layers]
    # What bitsandbytes' own layers merge they quantize again.
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
                merge(layer) if requantizes else layer.merge()
            return [(path, p.detach()) for path, p in base.named_parameters(block.name)]
        finally:
            for layer, active in states:
                layer.merged_adapters[:] = active

    copies = {f"module.{path}": copy for path, copy in copies.items()}
    merged = functional_call(_Work(block.module, merge_copies), copies)
    del copies
    yield from merged
    for name, module in base.named_modules(prefix=block.name):
        yield from _buffers(name, module)


def is_quantized(model: nn.Module) -> bool:
    """Whether a transformers model, or the one below an adapter, holds quantized weights."""
    return bool(getattr(model, "is_quantized", False))


def operations_per_token(model: nn.Module) -> int:
    """Estimate the floating-point operations of both passes of a token: 6 for each weight.

    Weights of embeddings do not count, also where the output projection shares them, as in
    transformers. Sharded and quantized weights count whole.
    """
    layers = (module for module in model.modules() if isinstance(module, nn.Embedding))
    embeddings = {id(weight) for layer in layers for weight in layer.parameters()}
    return 6 * sum(_entries(p) for p in model.parameters() if id(p) not in embeddings)


def _entries(weight: nn.Parameter) -> int:
    """Entries of a whole weight, of which this rank or a quantized format may hold fewer."""
    state = getattr(weight, "quant_state", None)
    shape = getattr(weight, "ds_shape", weight.shape) if state is None else state.shape
    return math.prod(shape)


def check_sharding(model: nn.Module, accelerator: Any) -> None:
    """Refuse quantized weights that FSDP1, which flattens floats only, or FSDP2 cannot shard."""
    version = Ranks(accelerator).fsdp_version
    bits = 8 if getattr(model, "is_loaded_in_8bit", False) else 4
    if is_quantized(model) and (version == 1 or (version is not None and bits == 8)):
        raise ValueError(
            f"FSDP{version} cannot shard a base model in {bits} bits. Use 4 bits under "
            "FSDP2 (--accelerate_config fsdp2), or ZeRO-3 (--accelerate_config zero3)."
        )


def keep_trainable(model: nn.Module) -> None:
    """Stop bitsandbytes from converting 4-bit weights for inference when the model evaluates.

    On processors with AVX512-BF16 it does so at the first forward in evaluation mode: scales are
    rounded to bfloat16, and no gradient passes through the layer from then on. Weights that were
    converted before are refused: it cannot be undone exactly.
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


def working_precision(causal: Any) -> torch.dtype:
    """Precision in which layers multiply, which may be less than that of other weights."""
    config: Any = getattr(causal.config, "quantization_config", None)
    if getattr(config, "load_in_8bit", False):
        return torch.float16  # activations are rounded to 8 bits of each token's largest
    if getattr(config, "load_in_4bit", False) and config.bnb_4bit_compute_dtype is not None:
        return config.bnb_4bit_compute_dtype
    return causal.dtype


def quantization_of(module: nn.Module) -> Any:
    """How bitsandbytes holds the weight of a module in 4 bits; None if it does not."""
    held = getattr(getattr(module, "weight", None), "quant_state", None)
    # Engines that shard weights put their own parameters in the place of those of bitsandbytes.
    return held if held is not None else getattr(module, "quant_state", None)
