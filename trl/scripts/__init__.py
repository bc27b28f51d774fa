"""The training commands as modules that `accelerate launch --module` starts."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module(f"{__name__}.utils"), name)
