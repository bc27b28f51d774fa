"""Declaring configuration fields: the help text is written once and serves CLI, docs and IDE."""

import dataclasses
from typing import Any


def option(default: Any, help_text: str, choices: tuple[str, ...] | None = None) -> Any:
    """Declare a dataclass field of a configuration.

    Args:
        default: default value; a list is copied for each instance.
        help_text (`str`): one sentence shown by `--help` and used as documentation.
        choices (`tuple[str, ...]`, *optional*): the values allowed.

    Returns:
        What `dataclasses.field` returns.
    """
    metadata: dict[str, Any] = {"help": help_text}
    if choices is not None:
        metadata["choices"] = list(choices)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
