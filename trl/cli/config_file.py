"""Options in a YAML file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml


def read_config(path: str) -> dict[str, Any]:
    """Read a YAML file of options, and put its `env` mapping into the environment.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is not valid YAML, a key is given twice, or it or its `env` is not
            a mapping.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"--config {path}: there is no such file.")
    text = Path(path).read_text(encoding="utf-8")
    try:
        config = yaml.load(text, _Loader) or {}
    except _TwiceError as error:
        raise ValueError(f"{path}: {error}.") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must be a mapping of option names to values.")
    environment = config.pop("env", {})
    if not isinstance(environment, dict):
        raise ValueError(f"env in {path} must be a mapping of names to values.")
    os.environ.update({str(name): str(value) for name, value in environment.items()})
    return _with_underscores(config, path)


class _TwiceError(yaml.YAMLError):
    """A key stands twice in a mapping."""


class _Loader(yaml.SafeLoader):
    """YAML's last of several equal keys would win silently."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node: Any = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            name, line = (key.tag, str(key.value)), key.start_mark.line + 1
            if name in lines:
                where = f"in lines {lines[name]} and {line}"
                raise _TwiceError(f"the key {name[1]} is given twice, {where}")
            lines[name] = line
        return node


def _with_underscores(config: dict[Any, Any], path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = str(key).replace("-", "_")
        if name in found:
            raise ValueError(f"{path}: the key {name} is given twice, once with hyphens.")
        found[name] = value
    return found
