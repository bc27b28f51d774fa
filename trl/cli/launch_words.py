"""Words of a command line that are for `accelerate launch`."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from .parser import OptionParser


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


def option_name(word: str) -> str:
    """The name in a word such as "--num-processes=2"."""
    return word.removeprefix("--").split("=")[0].replace("-", "_")


def check_launch_options(parser: OptionParser, words: Sequence[str]) -> None:
    """Check words that are no options of a training script.

    Raises:
        ValueError: for one that is no option of `accelerate launch` either.
    """
    unknown = unknown_options(words)
    if unknown:
        raise ValueError(f"{parser.unknown(unknown, sorted(launch_option_names()))}.")


def unknown_options(words: Sequence[str]) -> list[str]:
    """The words that start with hyphens and are no options of `accelerate launch`."""
    legal = launch_option_names()
    return [word for word in words if word.startswith("--") and option_name(word) not in legal]
