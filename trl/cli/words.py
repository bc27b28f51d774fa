"""The words of a command line: what they name, and what is said of those that nobody knows."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def option_name(word: str) -> str:
    """The name in a word such as "--num-processes=2"."""
    return word.removeprefix("--").split("=")[0].replace("-", "_")


def as_words(values: Mapping[str, Any]) -> list[str]:
    """Write options as command-line words."""
    words: list[str] = []
    for name, value in values.items():
        items = value if isinstance(value, (list, tuple)) else [value]
        words += [f"--{name}", *map(str, items)]
    return words


@cache
def launch_option_names() -> frozenset[str]:
    """The options of `accelerate launch`, and `accelerate_config`, as its source lists them."""
    spec = importlib.util.find_spec("accelerate")
    source = Path(str(spec and spec.origin)).parent / "commands" / "launch.py"
    words = {
        word.value
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
        for word in node.args
        if isinstance(word, ast.Constant) and str(word.value).startswith("--")
    }
    return frozenset({"accelerate_config", "help", *(option_name(str(word)) for word in words)})


def describe_unknown(
    names: Iterable[str], legal: Iterable[str], keys: Mapping[str, str], program: str
) -> str:
    """Say which options a program does not know, with what may have been meant.

    `legal` are the options there are; `keys` has the path of the file for those that stand in one.
    """
    legal = list(legal)
    places: dict[str | None, list[str]] = {}
    for name in names:
        places.setdefault(keys.get(name), []).append(name)
    parts = []
    for path, found in places.items():
        many = "s" if len(found) > 1 else ""
        start = f"unknown option{many}" if path is None else f"{path}: unknown key{many}"
        dashes = "--" if path is None else ""
        hints = (f"{dashes}{name}{_hint(name, legal, dashes, program)}" for name in found)
        parts.append(f"{start} {', '.join(hints)}")
    return f"{'; '.join(parts)}."


def _hint(name: str, legal: list[str], dashes: str, program: str) -> str:
    close = difflib.get_close_matches(name, legal, n=3, cutoff=0.6)
    hints = [f"closest: {', '.join(dashes + other for other in close)}"] if close else []
    if program.startswith("trl "):
        # Commands have parsers, which tell of unknown options: an import above would be circular.
        commands = import_module(f"{__package__}.commands").commands_with(name)
        hints += [f"an option of `trl {'`, `trl '.join(commands)}`"] if commands else []
    return f" ({'; '.join(hints)})" if hints else ""
