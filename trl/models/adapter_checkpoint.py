"""Adapters on disk: stored without the base model, restored whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig

from ..imports import require
from .reference import REFERENCE_ADAPTER, is_peft_model

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
# They change what an adapter does, and no tensor shows it.
SCALES = ("peft_type", "lora_alpha", "alpha_pattern", "use_rslora")
MOST_NAMED = 5

Shapes = dict[str, tuple[int, ...]]


@contextmanager
def storing_adapters_only(model: nn.Module) -> Iterator[None]:
    """Inside, an adapter on the embedding or the head is stored without the matrix below it.

    A matrix with rows that the base model lacks, for added tokens, is stored all the same.
    """
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
    """Refuse a checkpoint whose adapters are not exactly those of the model.

    Args:
        model: the policy, with an adapter or without; wrapped for training or not.
        folder: a checkpoint.

    Raises:
        ValueError: naming the adapters, tensors or options that differ.
    """
    folder = Path(folder)
    stored = {"default"} if (folder / CONFIG).exists() else set()
    stored |= {path.parent.name for path in folder.glob(f"*/{CONFIG}")}
    if not is_peft_model(model):
        if stored:
            raise ValueError(
                f"{folder} holds an adapter, but the model has none: give the peft_config "
                "(--use_peft) or the adapter that the run was started with."
            )
        return
    if not stored:
        raise ValueError(f"{folder} holds no adapter, but an adapter is trained.")
    if (names := set(model.peft_config)) != stored:
        raise ValueError(_other_adapters(folder, names - stored, stored - names))
    for name in model.peft_config:
        _check_one(model, name, folder if name == "default" else folder / name)


def _other_adapters(folder: Path, missing: set[str], extra: set[str]) -> str:
    lacking, unexpected = (", ".join(sorted(names)) or "none" for names in (missing, extra))
    return (
        f"{folder}: its adapters differ from those of the model. Missing: {lacking}; "
        f"unexpected: {unexpected}. {REFERENCE_ADAPTER!r} is the frozen copy of an adapter that "
        "serves as reference; there is none if beta is 0."
    )


def _check_one(model: Any, name: str, folder: Path) -> None:
    ours = model.peft_config[name].to_dict()
    theirs = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    for option in SCALES:
        if ours.get(option) != theirs.get(option):
            raise ValueError(
                f"{folder / CONFIG}: {option} is {theirs.get(option)!r}, but {ours.get(option)!r} "
                f"in the adapter {name!r} of the model; resume with the options of the run."
            )
    stored, expected = _stored_shapes(folder / WEIGHTS), _expected_shapes(model, name)
    problems = {
        "missing": sorted(expected.keys() - stored.keys()),
        "unexpected": sorted(stored.keys() - expected.keys()),
        "of another shape": [
            f"{name} {stored[name]} instead of {expected[name]}"
            for name in sorted(stored.keys() & expected.keys())
            if stored[name] != expected[name]
        ],
    }
    words = [f"{kind}: {_few(names)}" for kind, names in problems.items() if names]
    if words:
        raise ValueError(
            f"{folder / WEIGHTS} does not fit the adapter of the model. {'; '.join(words)}."
        )


def _few(names: list[str]) -> str:
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _stored_shapes(path: Path) -> Shapes:
    if not path.exists():
        raise ValueError(f"{path} is missing from the checkpoint.")
    with safe_open(str(path), framework="pt") as file:
        names = list(file.keys())
        return {name: tuple(file.get_slice(name).get_shape()) for name in names}


def _expected_shapes(model: Any, name: str) -> Shapes:
    states = require("peft", "the adapter").get_peft_model_state_dict(
        model,
        state_dict=model.state_dict(keep_vars=True),
        adapter_name=name,
        save_embedding_layers=_has_grown(model),
    )
    # ZeRO-3 keeps the shape of a parameter beside the part of it that is here.
    return {key: tuple(getattr(value, "ds_shape", value.shape)) for key, value in states.items()}


def _has_grown(model: Any) -> bool:
    """Whether the vocabulary was enlarged after the base model was loaded."""
    name = model.config._name_or_path
    try:
        stored, _ = PretrainedConfig.get_config_dict(name)
    except (OSError, ValueError):  # made in memory, so there is nothing to compare with
        return False
    return stored.get("vocab_size", model.config.vocab_size) != model.config.vocab_size
