"""Check that the adapters in a checkpoint are those of the model that resumes from it."""

import json
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from safetensors import safe_open
from torch import nn

from ..imports import require
from . import loading
from .adapter_files import CONFIG, WEIGHTS
from .reference import REFERENCE_ADAPTER
from .unwrap import is_peft_model

# Options that change what an adapter computes without changing the shapes of its tensors.
SCALES = ("peft_type", "lora_alpha", "alpha_pattern", "use_rslora")


def check_adapters(model: nn.Module, folder: str | Path) -> None:
    """Raise a ValueError if the adapters in a checkpoint differ from those of the model."""
    folder = Path(folder)
    stored = {"default": folder} if (folder / CONFIG).exists() else {}
    stored |= {path.parent.name: path.parent for path in folder.glob(f"*/{CONFIG}")}
    trained = model.peft_config if is_peft_model(model) else {}
    _check_names(folder, trained.keys(), stored.keys())
    for name, config in trained.items():
        path = stored[name] / CONFIG
        model_options = config.to_dict()
        stored_options = json.loads(path.read_text(encoding="utf-8"))
        for option in SCALES:
            expected = model_options.get(option)
            value = stored_options.get(option)
            if value != expected:
                raise ValueError(
                    f"{path}: {option} is {value!r}, but {expected!r} in the adapter {name!r} of "
                    "the model; resume with the options of the run."
                )
        _check_tensors(model, name, stored[name] / WEIGHTS)


def _check_names(folder: Path, trained: Set[str], stored: Set[str]) -> None:
    if stored and not trained:
        raise ValueError(
            f"{folder} holds an adapter, but the model has none: give the peft_config "
            "(--use_peft) or the adapter that the run was started with."
        )
    if trained and not stored:
        raise ValueError(f"{folder} holds no adapter, but the model has one: leave it out.")
    if trained != stored:
        missing = ", ".join(sorted(trained - stored)) or "none"
        unexpected = ", ".join(sorted(stored - trained)) or "none"
        raise ValueError(
            f"{folder}: the adapters differ from those of the model. Missing: {missing}; "
            f"unexpected: {unexpected}. {REFERENCE_ADAPTER!r} is the frozen copy of an adapter "
            "that serves as reference; it does not exist if beta is 0."
        )


def _check_tensors(model: nn.Module, name: str, path: Path) -> None:
    """Raise a ValueError if a file does not have the names and shapes that would be stored."""
    if not path.exists():
        raise ValueError(f"{path} is missing from the checkpoint.")
    with safe_open(str(path), framework="pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    weights = require("peft", "the adapter").get_peft_model_state_dict(
        model,
        model.state_dict(keep_vars=True),
        adapter_name=name,
        save_embedding_layers=loading.vocabulary_has_grown(model),
    )
    # With ZeRO-3, the shape of the whole parameter is `ds_shape`.
    expected = _described({key: getattr(x, "ds_shape", x.shape) for key, x in weights.items()})
    stored = _described(shapes)
    problems = {"missing": sorted(expected - stored), "unexpected": sorted(stored - expected)}
    texts = []
    for problem, names in problems.items():
        if names:
            text = f"{problem}: {', '.join(names[: loading.MOST_NAMED])}"
            if len(names) > loading.MOST_NAMED:
                text += f" and {len(names) - loading.MOST_NAMED} more"
            texts.append(text)
    if texts:
        raise ValueError(f"{path} does not fit the adapter of the model. {'; '.join(texts)}.")


def _described(shapes: Mapping[str, Sequence[int]]) -> set[str]:
    return {f"{name} ({'x'.join(map(str, shape))})" for name, shape in shapes.items()}
