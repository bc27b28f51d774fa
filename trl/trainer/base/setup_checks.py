"""Checks that every trainer makes before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...text import did_you_mean
from .base_config import BaseConfig


def check_run(model: Any, args: Any, config_class: type[BaseConfig]) -> None:
    """Check that the options are the trainer's, and where the model is and will be.

    Raises:
        TypeError: if `args` is of another class.
        FileNotFoundError: if `model` is a path and nothing is there.
        ValueError: if the output would replace the model.
    """
    if not isinstance(args, config_class):
        raise TypeError(
            f"args must be an instance of {config_class.__name__}, not of {type(args).__name__}."
        )
    config = getattr(model, "config", None)
    name = model if isinstance(model, str) else getattr(config, "_name_or_path", "")
    if name and args.output_dir:
        _check_places(name, isinstance(model, str), args.output_dir)


def _check_places(name: str, is_wanted: bool, output: str) -> None:
    place = Path(name).expanduser()
    if is_wanted and name.startswith((".", "/", "~")) and not place.exists():
        beside = [path.name for path in place.parent.glob("*/")]
        raise FileNotFoundError(
            f"model={name!r}: there is no such folder.{did_you_mean(place.name, beside)}"
        )
    if place.is_dir() and place.resolve() == Path(output).resolve():
        raise ValueError(
            f"output_dir={output!r} is the folder of the model, which would be replaced. Choose "
            "another one."
        )
