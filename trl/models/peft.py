"""The adapter of the policy: a new one, or one that is continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.peft_utils import find_adapter_config_file

from ..imports import is_available, require
from .quantized import is_quantized
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
        ValueError: if `model` already has an adapter.
    """
    peft = require("peft", "peft_config")
    if not isinstance(peft_config, peft.PeftConfig):
        raise TypeError(f"peft_config must be a peft.PeftConfig, not {type(peft_config).__name__}.")
    if is_peft_model(model):
        raise ValueError(
            "The model already has an adapter: pass it without peft_config to continue training "
            "that adapter, or merge it first."
        )
    wrapped = peft.get_peft_model(_prepare_base(model), peft_config)
    if checkpointing:
        wrapped.enable_input_require_grads()
    return wrapped


def continue_adapter(model: nn.Module, checkpointing: bool) -> None:
    """Prepare a model that came with an adapter for training it further.

    Args:
        model (`PeftModel`): changed in place.
        checkpointing (`bool`): as in `add_adapter`.

    Raises:
        ValueError: if the adapter is frozen.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "Nothing in the model can be trained: its adapter was loaded for inference. Load it "
            "with PeftModel.from_pretrained(model, folder, is_trainable=True)."
        )
    if checkpointing:
        model.enable_input_require_grads()


def _prepare_base(model: PreTrainedModel) -> PreTrainedModel:
    """Freeze a quantized base model and widen what is not quantized, as peft advises."""
    if not is_quantized(model):
        return model
    prepare = require("peft", "peft_config").prepare_model_for_kbit_training
    return prepare(model, use_gradient_checkpointing=False)


def is_adapter(name: str, revision: str | None = None) -> bool:
    """Whether a folder or hub id holds an adapter rather than a model.

    Args:
        name (`str`): folder or hub id.
        revision (`str`, *optional*): branch, tag or commit of a hub id.
    """
    if (Path(name) / "config.json").exists() or not is_available("peft"):
        return False
    try:
        return find_adapter_config_file(name, revision=revision) is not None
    except OSError:  # neither a folder nor reachable, which loading says better
        return False


def adapter_base(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """Name and revision of the model that a stored adapter was trained on.

    Raises:
        ValueError: if the adapter does not say.
    """
    config = require("peft", "the adapter").PeftConfig.from_pretrained(name, revision=revision)
    if not config.base_model_name_or_path:
        raise ValueError(
            f"The adapter {name!r} does not say which model it belongs to. Load that model, and "
            "the adapter with PeftModel.from_pretrained(model, folder, is_trainable=True)."
        )
    return config.base_model_name_or_path, config.revision


def load_adapter(model: PreTrainedModel, name: str, revision: str | None = None) -> nn.Module:
    """Put a stored adapter on its base model, to be trained further."""
    peft = require("peft", "the adapter")
    base = _prepare_base(model)
    return peft.PeftModel.from_pretrained(base, name, is_trainable=True, revision=revision)
