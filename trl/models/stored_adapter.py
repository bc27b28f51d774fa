"""Read a stored adapter: which model it was trained on, and whether it can be merged."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download
from safetensors import safe_open

from ..imports import require
from ..suggestions import did_you_mean
from .adapter_files import CONFIG, WEIGHTS, read_adapter_config

if TYPE_CHECKING:
    from peft import PeftConfig

RUN_RECORD = "run.json"  # which trainers write into their output folder


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter in a folder, and the model it was trained on."""

    folder: Path
    config: "PeftConfig"
    shapes: dict[str, list[int]]  # of each tensor in its file
    base_model: str
    revision: str | None
    quantization: dict[str, Any] | None  # of the base model during training, if it is recorded

    @property
    def start(self) -> str:
        """Value of `init_lora_weights`, in lower case."""
        return str(getattr(self.config, "init_lora_weights", True)).lower()


def read_adapter(name: str, base_model: str | None = None) -> StoredAdapter:
    """Read the adapter in a folder or in a repository of the hub, without its weights.

    Raises ValueError or OSError if there is none, if it cannot be merged, or if a file is missing.
    """
    folder = _folder_of(name)
    _check_files(folder)
    require("peft", "trl merge")
    config = read_adapter_config(str(folder))
    _check_can_merge(config)
    base = base_model or config.base_model_name_or_path
    if not base:
        raise ValueError(
            f"{folder / CONFIG} does not name the model that the adapter was trained on: "
            "give --base_model."
        )
    if (Path(base) / CONFIG).exists():
        raise ValueError(
            f"The base model {base!r} is an adapter itself. Merge that one first, and give the "
            "result as --base_model."
        )
    return StoredAdapter(
        folder=folder,
        config=config,
        shapes=_shapes(folder / WEIGHTS),
        base_model=base,
        revision=None if base_model else config.revision,
        quantization=_recorded_quantization(folder),
    )


def _folder_of(name: str) -> Path:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(name, ignore_patterns=["checkpoint-*"]))
    except (OSError, ValueError) as error:
        hint = did_you_mean(folder.name, [path.name for path in folder.parent.glob("*/")])
        reason = "" if hint else f" {str(error).splitlines()[0]}"
        raise FileNotFoundError(
            f"There is no folder {name!r}, and no such adapter on the hub.{hint}{reason}"
        ) from error


def _check_files(folder: Path) -> None:
    if not (folder / CONFIG).exists():
        checkpoints = [path.parent for path in folder.glob(f"*/{CONFIG}")]
        if (folder / "config.json").exists():
            raise ValueError(f"{folder} holds a whole model, not an adapter: nothing to merge.")
        newest = max(checkpoints, key=lambda path: path.stat().st_mtime, default=None)
        hint = f" The newest in it is {newest}." if newest else ""
        raise FileNotFoundError(f"{folder} holds no adapter: {CONFIG} is missing.{hint}")
    if not (folder / WEIGHTS).exists():
        raise FileNotFoundError(
            f"{folder / WEIGHTS} is missing, so the adapter has no weights. Merge another "
            "checkpoint, or save the adapter again."
        )


def _check_can_merge(config: "PeftConfig") -> None:
    """Raise a ValueError if an adapter does not change weights, or has a task of no trainer."""
    peft = require("peft", "trl merge")
    peft_type = peft.PeftType(config.peft_type).value
    tuner = peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type)
    if config.is_prompt_learning or not hasattr(tuner, "merge_and_unload"):
        raise ValueError(
            f"An adapter of type {peft_type} adds tokens or layers instead of "
            "changing weights, so it cannot be merged. Use it with "
            "peft.PeftModel.from_pretrained."
        )
    if config.task_type not in (None, "CAUSAL_LM", "SEQ_CLS"):
        raise ValueError(
            f"task_type={str(config.task_type)!r}: only adapters of causal language models "
            "(CAUSAL_LM) and of sequence classifiers (SEQ_CLS) can be merged here."
        )


def _shapes(path: Path) -> dict[str, list[int]]:
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def _recorded_quantization(folder: Path) -> dict[str, Any] | None:
    """Return how the run that wrote a folder quantized the base model; None if not recorded."""
    for record in (folder / RUN_RECORD, folder.resolve().parent / RUN_RECORD):
        if record.is_file():
            run: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
            return run.get("quantization")
    return None
