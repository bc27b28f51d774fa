"""The adapter of a policy: new or continued, and its checkpoints."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.peft_utils import find_adapter_config_file

from ..imports import is_available, require
from .reference import REFERENCE_ADAPTER
from .unwrap import is_peft_model
from .weights import is_quantized

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
# They change what an adapter does, and no tensor shows it.
SCALES = ("peft_type", "lora_alpha", "alpha_pattern", "use_rslora")
MOST_NAMED = 5


@contextmanager
def _without_old_name() -> Iterator[None]:
    """Keep quiet that peft asks by a name that transformers has given up."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is", FutureWarning)
        yield


@_without_old_name()
def add_adapter(model: PreTrainedModel, peft_config: Any, checkpointing: bool) -> nn.Module:
    """Wrap a base model with the adapter that `peft_config` describes.

    Recomputing activations needs inputs that require gradients when the embedding is frozen.
    """
    peft = require("peft", "peft_config")
    if not isinstance(peft_config, peft.PeftConfig):
        raise TypeError(f"peft_config must be a peft.PeftConfig, not {type(peft_config).__name__}.")
    if is_peft_model(model):
        raise ValueError(
            "The model already has an adapter: pass it without peft_config to continue training "
            "that adapter, or merge it first."
        )
    if not model.can_generate() and peft_config.task_type in (None, "CAUSAL_LM"):
        peft_config = copy.deepcopy(peft_config)
        peft_config.task_type = "SEQ_CLS"  # for which peft also trains the layer of the score
    wrapped = peft.get_peft_model(_prepare_base(model), peft_config)
    if checkpointing:
        wrapped.enable_input_require_grads()
    return wrapped


def continue_adapter(model: nn.Module, checkpointing: bool) -> None:
    """Prepare a model that came with an adapter for training it further, as `add_adapter` does."""
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
    """Whether a folder or hub id holds an adapter rather than a model."""
    if (Path(name) / "config.json").exists() or not is_available("peft"):
        return False
    try:
        return find_adapter_config_file(name, revision=revision) is not None
    except OSError:  # neither a folder nor reachable, which loading says better
        return False


def adapter_base(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """Name and revision of the model that a stored adapter was trained on, which it must say."""
    config = require("peft", "the adapter").PeftConfig.from_pretrained(name, revision=revision)
    if not config.base_model_name_or_path:
        raise ValueError(
            f"The adapter {name!r} does not say which model it belongs to. Load that model, and "
            "the adapter with PeftModel.from_pretrained(model, folder, is_trainable=True)."
        )
    return config.base_model_name_or_path, config.revision


@_without_old_name()
def load_adapter(model: PreTrainedModel, name: str, revision: str | None = None) -> nn.Module:
    """Put a stored adapter on its base model, to be trained further."""
    kind, base = require("peft", "the adapter").PeftModel, _prepare_base(model)
    return kind.from_pretrained(base, name, is_trainable=True, revision=revision)


# --- Checkpoints ---


@contextmanager
def storing_adapters_only(model: nn.Module) -> Iterator[None]:
    """Inside, adapters of embedding and head are stored without its matrix unless it has grown."""
    if not is_peft_model(model) or _has_grown(model):
        yield
        return
    wrapped: Any = model
    wrapped.save_pretrained = partial(wrapped.save_pretrained, save_embedding_layers=False)
    try:
        yield
    finally:
        del wrapped.save_pretrained


def check_adapters(model: Any, folder: str | Path) -> None:
    """Refuse a checkpoint whose adapters are not those of the model, which may have none."""
    folder = Path(folder)
    stored = {"default": folder} if (folder / CONFIG).exists() else {}
    stored |= {path.parent.name: path.parent for path in folder.glob(f"*/{CONFIG}")}
    if not is_peft_model(model):
        if stored:
            raise ValueError(
                f"{folder} holds an adapter, but the model has none: give the peft_config "
                "(--use_peft) or the adapter that the run was started with."
            )
        return
    if not stored:
        raise ValueError(f"{folder} holds no adapter, but an adapter is trained.")
    names, given = set(model.peft_config), set(stored)
    if names != given:
        missing, extra = (
            ", ".join(sorted(some)) or "none" for some in (names - given, given - names)
        )
        raise ValueError(
            f"{folder}: its adapters differ from those of the model. Missing: {missing}; "
            f"unexpected: {extra}. {REFERENCE_ADAPTER!r} is the frozen copy of an adapter that "
            "serves as reference; there is none if beta is 0."
        )
    for name in model.peft_config:
        _check_one(model, name, stored[name])


def _check_one(model: Any, name: str, folder: Path) -> None:
    ours = model.peft_config[name].to_dict()
    theirs = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    for option in SCALES:
        if ours.get(option) != theirs.get(option):
            raise ValueError(
                f"{folder / CONFIG}: {option} is {theirs.get(option)!r}, but {ours.get(option)!r} "
                f"in the adapter {name!r} of the model; resume with the options of the run."
            )
    stored, expected = _stored(folder / WEIGHTS), _expected(model, name)
    problems = {"missing": expected - stored, "unexpected": stored - expected}
    words = [f"{kind}: {_few(sorted(tensors))}" for kind, tensors in problems.items() if tensors]
    if words:
        raise ValueError(
            f"{folder / WEIGHTS} does not fit the adapter of the model. {'; '.join(words)}."
        )


def _few(names: list[str]) -> str:
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _stored(path: Path) -> set[str]:
    """Names and shapes of the tensors in a file."""
    if not path.exists():
        raise ValueError(f"{path} is missing from the checkpoint.")
    with safe_open(str(path), framework="pt") as file:
        names = list(file.keys())
        return {_described(name, file.get_slice(name).get_shape()) for name in names}


def _expected(model: Any, name: str) -> set[str]:
    """Names and shapes of the tensors that would be stored."""
    states = require("peft", "the adapter").get_peft_model_state_dict(
        model,
        state_dict=model.state_dict(keep_vars=True),
        adapter_name=name,
        save_embedding_layers=_has_grown(model),
    )
    # ZeRO-3 keeps the shape of a parameter beside the part of it that is here.
    return {_described(key, getattr(x, "ds_shape", x.shape)) for key, x in states.items()}


def _described(name: str, shape: Sequence[int]) -> str:
    return f"{name} ({'x'.join(map(str, shape))})"


def _has_grown(model: Any) -> bool:
    """Whether the vocabulary was enlarged after the base model was loaded."""
    name = model.config._name_or_path
    try:
        stored, _ = PretrainedConfig.get_config_dict(name)
    except (OSError, ValueError):  # made in memory, so there is nothing to compare with
        return False
    return stored.get("vocab_size", model.config.vocab_size) != model.config.vocab_size
