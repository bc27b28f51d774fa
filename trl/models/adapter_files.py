"""Files of a stored adapter: what they must say before the base model is loaded."""

import json
from pathlib import Path
from typing import Any

from ..imports import require
from ..suggestions import did_you_mean

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
OLD_WEIGHTS = "adapter_model.bin"  # of earlier releases of peft


def read_adapter_config(name: str, revision: str | None = None) -> Any:
    """Read the `peft.PeftConfig` of an adapter, a folder or a repository of the hub.

    Raises a ValueError that names the file if it is damaged, or of a kind that peft does not have.
    """
    peft = require("peft", "the adapter")
    file = Path(name, CONFIG)
    try:
        config = peft.PeftConfig.from_pretrained(name, revision=revision)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON: {error}.") from error
    except KeyError as error:
        kind = error.args[0]
        kinds = [known.value for known in peft.PeftType]
        hint = did_you_mean(str(kind), kinds, f" Kinds are {', '.join(kinds)}.")
        raise ValueError(f"{file}: peft has no peft_type {kind!r}.{hint}") from error
    if config.peft_type is None:
        raise ValueError(f"{file} does not say what kind of adapter this is: peft_type is missing.")
    return config


def check_adapter_weights(folder: Path) -> None:
    """Raise a FileNotFoundError if the folder of an adapter has none of its weights."""
    if folder.is_dir() and not any((folder / x).exists() for x in (WEIGHTS, OLD_WEIGHTS)):
        raise FileNotFoundError(
            f"{folder / WEIGHTS} is missing, so the adapter has no weights. Choose another "
            "checkpoint, or save the adapter again."
        )


def first_mismatch(error: Exception) -> str:
    """Return the first weight that does not fit, of an error with a line for each."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[1] if len(lines) > 1 and lines[0].endswith(":") else lines[0]
    return text.rstrip(".")
