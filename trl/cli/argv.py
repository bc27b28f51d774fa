"""Options as command-line arguments.

In names of this folder, `argv` is a list of command-line arguments, as in `sys.argv[1:]`.
"""

import ast
import importlib.util
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any


def required_options_error(names: Sequence[str]) -> str:
    """Return the error for required options that were not given."""
    options = [f"--{name}" for name in names]
    if len(options) == 1:
        return f"{options[0]} is required."
    return f"{', '.join(options[:-1])} and {options[-1]} are required."


def option_name(argument: str) -> str:
    """Return the name of the option in an argument such as "--num-processes=2"."""
    return argument.removeprefix("--").split("=")[0].replace("-", "_")


def to_argv(values: Mapping[str, Any]) -> list[str]:
    """Write options as command-line arguments."""
    argv: list[str] = []
    for name, value in values.items():
        entries = value if isinstance(value, (list, tuple)) else [value]
        argv += [f"--{name}", *map(str, entries)]
    return argv


@cache
def launch_option_names() -> frozenset[str]:
    """Return the options of `accelerate launch`, read from its source, and `accelerate_config`."""
    spec = importlib.util.find_spec("accelerate")
    source = Path(str(spec and spec.origin)).parent / "commands" / "launch.py"
    option_strings = {
        str(argument.value)
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
        for argument in node.args
        if isinstance(argument, ast.Constant) and str(argument.value).startswith("--")
    }
    return frozenset({"accelerate_config", "help", *map(option_name, option_strings)})
