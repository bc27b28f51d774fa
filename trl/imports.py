"""What is imported late: optional dependencies, and the public names of a part of the package."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

EXTRAS = {
    "bitsandbytes": "quantization",
    "deepspeed": "deepspeed",
    "liger_kernel": "liger",
    "latex2sympy2_extended": "math-verify",
    "math_verify": "math-verify",
    "matplotlib": "quickstart",
    "peft": "peft",
    "rich": "quickstart",
    "vllm": "vllm",
}


def is_available(module: str) -> bool:
    """Whether `module` can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def require(module: str, feature: str) -> ModuleType:
    """Import an optional dependency.

    Args:
        module (`str`): name of a module; its package is one of the keys of `EXTRAS`.
        feature (`str`): what needs it, for the message.

    Raises:
        ImportError: naming the extra to install, if the module is absent.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        extra = EXTRAS[package]
        raise ImportError(
            f"{feature} needs the package `{package}`, which is not installed. "
            f"Run: pip install 'trl[{extra}]'"
        ) from error


def public_names(part: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a part of the package, which finds what `trl` exports of it.

    Args:
        part (`str`): such as "trl.trainer".
    """
    package, _, inner = part.partition(".")

    def find(name: str) -> Any:
        root = sys.modules[package]
        if root._HOME.get(name, "").startswith(f"{inner}."):
            return getattr(root, name)
        raise AttributeError(f"module {part!r} has no attribute {name!r}")

    return find
