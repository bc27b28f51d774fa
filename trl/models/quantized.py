"""Base models whose weights bitsandbytes holds in 4 or 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import fsdp_version
from ..imports import require


def is_quantized(model: nn.Module) -> bool:
    """Whether a transformers model, or the one below an adapter, holds quantized weights."""
    return bool(getattr(model, "is_quantized", False))


def check_sharding(model: nn.Module, accelerator: Any) -> None:
    """Refuse quantized weights that an engine cannot divide.

    FSDP1 flattens floating-point weights only, and FSDP2 cannot divide 8 bits.
    """
    version = fsdp_version(accelerator)
    bits = 8 if getattr(model, "is_loaded_in_8bit", False) else 4
    if is_quantized(model) and (version == 1 or (version is not None and bits == 8)):
        raise ValueError(
            f"A base model in {bits} bits cannot be divided by FSDP{version}. Use 4 bits under "
            "FSDP2 (--accelerate_config fsdp2), or ZeRO-3 (--accelerate_config zero3)."
        )


def keep_trainable(model: nn.Module) -> None:
    """Stop bitsandbytes from converting 4-bit weights for inference when the model evaluates.

    On processors with AVX512-BF16 it does so at the first forward in evaluation mode: scales are
    rounded to bfloat16, and no gradient passes through the layer from then on. Weights that were
    converted before are refused: it cannot be undone exactly.
    """
    for name, module in model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise ValueError(
                f"bitsandbytes has converted the 4-bit weights of {name} for inference, which "
                "rounds them and stops gradients: a forward was made in evaluation mode. Load the "
                "model again and pass it before it is used, or pass its name."
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


def dequantized(values: Tensor, state: Any) -> Tensor:
    """The weight that layers multiply with, of packed values and what `quantization_of` found."""
    if values.dtype != torch.uint8:
        values = values.contiguous().view(torch.uint8)
    bitsandbytes = require("bitsandbytes", "a quantized model")
    dense: Tensor = bitsandbytes.functional.dequantize_4bit(values.reshape(-1, 1), state)
    return dense


def bytes_of_weight(causal: nn.Module) -> float | None:
    """Mean bytes of a weight in 4 bits with its share of the scales; None if there is none."""
    held = entries = 0
    for module in causal.modules():
        state = quantization_of(module)
        if state is not None:
            nested = state.state2.absmax.nbytes if state.nested else 0
            held += module.weight.nbytes + state.absmax.nbytes + nested  # type: ignore[operator]
            entries += state.shape.numel()
    return held / entries if entries else None
