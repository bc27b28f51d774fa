"""What is imported late: optional dependencies, and the public names of a part of the package."""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
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
    "weave": "weave",
}

# Oldest and newest version that the tests run with. Trainers override private methods of it.
TESTED = {"transformers": ("5.18", "5.23")}


def is_available(module: str) -> bool:
    """Whether `module` can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def version_of(package: str, otherwise: str = "unknown") -> str:
    """The installed version of a package, or `otherwise`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return otherwise


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


def beyond_tested(package: str) -> str | None:
    """Say that the installed version of a package is newer than those tested; None if it is not.

    Args:
        package (`str`): a key of `TESTED`.
    """
    installed, (oldest, newest) = version(package), TESTED[package]
    if _numbers(installed) <= _numbers(newest):
        return None
    return (
        f"{package} {installed} is newer than the versions that trl was tested with "
        f"({oldest} to {newest}). If training fails or behaves oddly, run: "
        f"pip install '{package}=={newest}.*'"
    )


def _numbers(version: str) -> list[int]:
    """The first two numbers of a version, which can be compared."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


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
        if not name.startswith("_") and is_available(f"{part}.utils"):
            found = vars(importlib.import_module(f"{part}.utils"))
            if name in found:
                return found[name]
        raise AttributeError(f"module {part!r} has no attribute {name!r}")

    return find
