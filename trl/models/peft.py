"""Adding an adapter to the policy."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..imports import require
from .reference import is_peft_model


def add_adapter(model: PreTrainedModel, peft_config: Any, checkpointing: bool) -> nn.Module:
    """Wrap `model` with the adapter that `peft_config` describes.

    Args:
        model (`PreTrainedModel`): the base model.
        peft_config (`peft.PeftConfig`): the adapter.
        checkpointing (`bool`): whether activations are recomputed, which needs inputs that
            require gradients when the embedding is frozen.

    Raises:
        ImportError: if peft is not installed.
        TypeError: if `peft_config` is not a `PeftConfig`.
        ValueError: if `model` already has an adapter, or the adapter targets the output head.
    """
    peft = require("peft", "peft_config")
    if not isinstance(peft_config, peft.PeftConfig):
        raise TypeError(f"peft_config must be a peft.PeftConfig, not {type(peft_config).__name__}.")
    if is_peft_model(model):
        raise ValueError(
            "The model already has an adapter: pass it without peft_config to continue training "
            "that adapter, or merge it first."
        )
    targets = peft_config.target_modules or ()
    if "lm_head" in ([targets] if isinstance(targets, str) else targets):
        raise ValueError("An adapter on lm_head is not supported; take it out of target_modules.")
    if getattr(model, "is_quantized", False):
        model = peft.prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=checkpointing
        )
    wrapped = peft.get_peft_model(model, peft_config)
    if checkpointing:
        wrapped.enable_input_require_grads()
    return wrapped
