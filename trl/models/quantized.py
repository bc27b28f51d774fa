"""Base models whose weights bitsandbytes holds in 4 or 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..distributed import fsdp_version


def is_quantized(model: nn.Module) -> bool:
    """Whether a transformers model, or the one below an adapter, holds quantized weights."""
    return bool(getattr(model, "is_quantized", False))


def check_sharding(model: nn.Module, accelerator: Any) -> None:
    """Refuse quantized weights that an engine cannot divide.

    Raises:
        ValueError: under FSDP1, which flattens floating-point weights only, and for 8 bits under
            FSDP2.
    """
    version = fsdp_version(accelerator)
    if version is None or not is_quantized(model):
        return
    eight = bool(getattr(model, "is_loaded_in_8bit", False))
    if version == 1 or eight:
        raise ValueError(
            f"A base model in {8 if eight else 4} bits cannot be divided by "
            f"FSDP{version}. Use 4 bits under FSDP2 (--accelerate_config fsdp2), or "
            "ZeRO-3 (--accelerate_config zero3)."
        )


def keep_trainable(model: nn.Module) -> None:
    """Stop bitsandbytes from converting 4-bit weights for inference when the model evaluates.

    On processors with AVX512-BF16 it does so at the first forward in evaluation mode: scales are
    rounded to bfloat16, and no gradient passes through the layer from then on.

    Args:
        model: a quantized model; changed in place.

    Raises:
        ValueError: if weights were converted before, which cannot be undone exactly.
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
    """Precision in which layers multiply, which may be less than that of the weights at the ends.

    Args:
        causal: a transformers model without wrappers.
    """
    config: Any = getattr(causal.config, "quantization_config", None)
    if getattr(config, "load_in_8bit", False):
        return torch.float16  # activations are rounded to 8 bits of each token's largest
    if getattr(config, "load_in_4bit", False) and config.bnb_4bit_compute_dtype is not None:
        return config.bnb_4bit_compute_dtype
    return causal.dtype
