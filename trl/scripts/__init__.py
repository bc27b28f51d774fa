"""The programs of the training commands, for `accelerate launch --module`."""

from importlib import import_module


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module(f"{__name__}.utils"), name)
