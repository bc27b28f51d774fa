"""What is imported late, and the messages about names and packages that are missing."""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import (
    PackageNotFoundError,
    packages_distributions,
    requires,
    version,
)
from types import ModuleType
from typing import Any, NoReturn

from .suggestions import did_you_mean

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

CORE = ("accelerate", "datasets", "torch", "transformers")
# Oldest and newest version that the tests run with. Trainers override private methods of it.
TESTED = {"transformers": ("5.17", "5.23")}


def is_available(module: str) -> bool:
    """Whether `module` can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def is_at_least(module: str, min_version: str) -> bool:
    """Whether the installed package of a module is `min_version`, such as "0.5.0", or newer.

    Raises:
        ValueError: if `min_version` is no version.
    """
    from packaging.version import InvalidVersion, Version  # few runs need it

    try:
        oldest = Version(min_version)
    except InvalidVersion:
        raise ValueError(f"min_version={min_version!r} must be a version, such as '1.2'.") from None
    # Distributions may have another name than their module, such as pillow with PIL.
    names = packages_distributions().get(module, [module])
    installed = version_of(names[0], "")
    return bool(installed) and Version(installed) >= oldest


def version_of(package: str, otherwise: str = "unknown") -> str:
    """The installed version of a package, or `otherwise`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return otherwise


def require(module: str, feature: str) -> ModuleType:
    """Import a module of one of `EXTRAS` that a feature needs; errors name the extra to install."""
    package = module.partition(".")[0]
    if problem := too_old(package):
        raise ImportError(f"{feature}: {problem}")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(
            f"{feature} needs the package `{package}`, which is not installed. "
            f"Run: pip install 'trl[{EXTRAS[package]}]'"
        ) from error


@cache
def floors() -> dict[str, str]:
    """The oldest supported version of each package that has one, as pyproject.toml states them.

    Empty where trl runs from a folder without being installed.
    """
    try:
        lines = requires("trl") or []
    except PackageNotFoundError:
        return {}
    pairs = (re.match(r"([\w-]+)\s*>=\s*([\d.]+)", line) for line in lines)
    return {pair[1].replace("-", "_"): pair[2] for pair in pairs if pair is not None}


@cache
def too_old(package: str) -> str | None:
    """Say that a package is installed in a version below its floor; None if it is not."""
    floor, name = floors().get(package, ""), package.replace("_", "-")
    installed = version_of(name, "")
    if not floor or not installed or _release(installed) >= _release(floor):
        return None
    return (
        f"trl needs {name} {floor} or newer, but {installed} is installed. "
        f"Run: pip install '{name}>={floor}'"
    )


def check_versions() -> None:
    """Raise an ImportError that names what trl always needs and is installed below its floor."""
    problems = filter(None, map(too_old, CORE))
    if problem := "; ".join(problems):
        raise ImportError(problem)


def beyond_tested(package: str) -> str | None:
    """Say that the installed version of one of `TESTED` is newer than those; None if it is not."""
    installed, (oldest, newest) = version(package), TESTED[package]
    if first_numbers(installed) <= first_numbers(newest):
        return None
    return (
        f"{package} {installed} is newer than the versions that trl was tested with "
        f"({oldest} to {newest}). If training fails or behaves oddly, run: "
        f"pip install '{package}=={newest}.*'"
    )


def _release(version: str) -> list[int]:
    """All numbers of a release, such as [2, 11, 0] of 2.11.0+cpu."""
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def first_numbers(version: str) -> list[int]:
    """The first two numbers of a version, which can be compared; [0] if there are none."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]] or [0]


def public_names(part: str, *others: str) -> Callable[[str], Any]:
    """Make a `__getattr__` that finds what `trl` exports of parts such as "trl.trainer"."""
    homes = tuple(f"{home.partition('.')[2]}." for home in (part, *others))

    def find(name: str) -> Any:
        root = sys.modules[__package__]
        if vars(root)["_HOME"].get(name, "").startswith(homes):
            return getattr(root, name)
        if not name.startswith("_") and is_available(f"{part}.utils"):
            found = vars(importlib.import_module(f"{part}.utils"))
            if name in found:
                return found[name]
        raise AttributeError(f"module {part!r} has no attribute {name!r}")

    return find


def refuse(name: str, known: Iterable[str]) -> NoReturn:
    """Say that `trl` has no such name, by an AttributeError, so that `hasattr` is False.

    From `from trl import NAME` it is an ImportError, as Python would drop the words of the other.
    """
    trainers = ", ".join(x for x in known if x.endswith("Trainer"))
    others = f" It is not part of this release, whose trainers are {trainers}."
    # Names of other methods of Hugging Face TRL differ in a letter or two from those that are here.
    hint = did_you_mean(name, known, others, cutoff=0.92)
    message = f"module 'trl' has no attribute {name!r}.{hint}"
    from_trl_import = sys._getframe(2).f_code.co_name == "_handle_fromlist"
    if from_trl_import and not is_available(f"trl.{name}"):
        raise ImportError(message.replace("has no attribute", "has no name"), name="trl")
    raise AttributeError(message)
