"""The factors of a LoRA adapter, for engines that hold the base model and the adapter apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .reference import is_peft_model
from .sharded import gather_of, whole
from .unwrap import causal_model
from .weights import Weights, adapted_layers, full_weights


@dataclass(frozen=True)
class Factors:
    """The change of one linear layer, whose weight becomes `weight + second @ first`.

    Args:
        layer (`str`): its name in the base model.
        first (`Tensor`): (rank, inputs).
        second (`Tensor`): (outputs, rank), times the scale of the adapter.
    """

    layer: str
    first: Tensor
    second: Tensor


def why_not_low_rank(model: nn.Module) -> str | None:
    """What makes a policy more than a frozen model with two factors for some of its layers.

    Args:
        model: before it is wrapped for training.

    Returns:
        The reason in words that follow "it has"; None if there is none.
    """
    if not is_peft_model(model):
        return "no adapter"
    peft: Any = model
    config = peft.active_peft_config
    if config.peft_type.value != "LORA":
        return f"an adapter of type {config.peft_type.value}, not LoRA"
    parts = {
        "modules_to_save": config.modules_to_save,
        "target_parameters": getattr(config, "target_parameters", None),
        "trainable_token_indices": getattr(config, "trainable_token_indices", None),
        "use_dora": config.use_dora,
        "lora_bias": config.lora_bias,
        "bias": config.bias != "none",
    }
    set_ones = [name for name, value in parts.items() if value]
    if set_ones:
        return f"an adapter with {', '.join(set_ones)}"
    causal = causal_model(model)
    ends = {id(causal.get_input_embeddings()), id(causal.get_output_embeddings())}
    for name, layer in adapted_layers(causal):
        if id(layer) in ends or not isinstance(layer.get_base_layer(), nn.Linear):
            return f"an adapter on {name}, which is not a linear layer inside the model"
        if layer.lora_variant or len(layer.active_adapters) != 1:
            return f"more than one pair of factors on {name}"
    return None


@torch.no_grad()
def low_rank_factors(model: nn.Module) -> Iterator[Factors]:
    """Yield the factors of each layer of a policy for which `why_not_low_rank` found no reason.

    Sharded factors are gathered layer by layer, so all ranks must go through all of them.

    Args:
        model: plain, or as it was prepared for training with DDP, FSDP2 or DeepSpeed.
    """
    gather = gather_of(model)
    for name, layer in adapted_layers(causal_model(model)):
        adapter = layer.active_adapters[0]
        pair = [layer.lora_A[adapter], layer.lora_B[adapter]]
        with nullcontext() if gather is None else gather(pair):
            first, second = (whole(m.weight).float().clone() for m in pair)
            yield Factors(name, first, second * layer.scaling[adapter])


def base_weights(model: nn.Module) -> Weights:
    """Yield each weight below the adapter of a policy; see `full_weights`."""
    layers = [layer for _, layer in adapted_layers(causal_model(model))]
    states = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield from full_weights(model)
    finally:
        for layer, state in zip(layers, states, strict=True):
            layer._disable_adapters = state


def base_stamp(model: nn.Module) -> int:
    """A number that changes when a weight below the adapter does."""
    causal = causal_model(model)
    layers = [layer for _, layer in adapted_layers(causal)]
    factors = {id(p) for layer in layers for p in layer.parameters()}
    factors -= {id(p) for layer in layers for p in layer.get_base_layer().parameters()}
    return sum(p._version for p in causal.parameters() if id(p) not in factors)
