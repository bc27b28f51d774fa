"""Import optional packages when they are needed, and check the versions of required ones."""

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
from typing import NoReturn

from .suggestions import did_you_mean

# For each optional module, the extra of trl that installs it.
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
# Oldest and newest version that the tests run with. The trainers override private methods of
# transformers, which any release may change.
TESTED = {"transformers": ("5.17", "5.23")}


def is_available(module: str) -> bool:
    """Return whether `module` can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def is_at_least(module: str, min_version: str) -> bool:
    """Return whether the package that provides a module has `min_version` or a newer version.

    Args:
        min_version: such as "0.5.0".

    Raises:
        ValueError: `min_version` is not a version.
    """
    from packaging.version import InvalidVersion, Version  # imported here because few runs need it

    try:
        minimum = Version(min_version)
    except InvalidVersion:
        raise ValueError(f"min_version={min_version!r} must be a version, such as '1.2'.") from None
    # A distribution may be called differently from its module: pillow provides PIL.
    distributions = packages_distributions().get(module, [module])
    installed = version_of(distributions[0], "")
    return bool(installed) and Version(installed) >= minimum


def version_of(package: str, otherwise: str = "unknown") -> str:
    """Return the installed version of a package, or `otherwise` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return otherwise


def require(module: str, feature: str) -> ModuleType:
    """Import an optional module, one of `EXTRAS` or below it, that a feature needs.

    Raises:
        ImportError: the package is missing or too old. The message says how to install it.
    """
    package = module.partition(".")[0]
    error_text = outdated_version_error(package)
    if error_text is not None:
        raise ImportError(f"{feature}: {error_text}")
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
def minimum_versions() -> dict[str, str]:
    """Return the minimum version of each package that has one in pyproject.toml.

    Empty if trl runs from a folder without being installed.
    """
    try:
        requirements = requires("trl") or []
    except PackageNotFoundError:
        return {}
    versions = {}
    for requirement in requirements:
        match = re.match(r"(?P<package>[\w-]+)\s*>=\s*(?P<version>[\d.]+)", requirement)
        if match is not None:
            versions[match["package"].replace("-", "_")] = match["version"]
    return versions


@cache
def outdated_version_error(package: str) -> str | None:
    """Return an error message if a package is installed but too old for trl, else None."""
    minimum = minimum_versions().get(package, "")
    name = package.replace("_", "-")
    installed = version_of(name, "")
    if not minimum or not installed or _release(installed) >= _release(minimum):
        return None
    return (
        f"trl needs {name} {minimum} or newer, but {installed} is installed. "
        f"Run: pip install '{name}>={minimum}'"
    )


def check_versions() -> None:
    """Raise an ImportError that names the required packages that are too old, if any."""
    errors = [outdated_version_error(package) for package in CORE]
    error_text = "; ".join(error for error in errors if error is not None)
    if error_text:
        raise ImportError(error_text)


def untested_version_warning(package: str) -> str | None:
    """Return a warning if a package of `TESTED` is newer than the tested versions, else None."""
    installed = version(package)
    oldest, newest = TESTED[package]
    if major_minor(installed) <= major_minor(newest):
        return None
    return (
        f"{package} {installed} is newer than the versions that trl was tested with "
        f"({oldest} to {newest}). If training fails or behaves oddly, run: "
        f"pip install '{package}=={newest}.*'"
    )


def _release(version: str) -> list[int]:
    """Return all numbers of a release: [2, 11, 0] for "2.11.0+cpu"."""
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def major_minor(version: str) -> list[int]:
    """Return the first two numbers of a version, to compare versions by; [0] if it has none."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]] or [0]


def lazy_exports(package: str, *more_packages: str) -> Callable[[str], object]:
    """Make a module's `__getattr__` that imports a public name when it is first used.

    The module then offers the names that `trl` exports from the given packages, such as
    "trl.trainer", and the names in the `utils` module of the first package, if it has one.
    """
    # `_HOME` of the package `trl` holds paths without "trl.", such as "trainer.dpo_trainer".
    prefixes = tuple(f"{name.partition('.')[2]}." for name in (package, *more_packages))

    def module_getattr(name: str) -> object:
        trl = sys.modules[__package__]
        if vars(trl)["_HOME"].get(name, "").startswith(prefixes):
            return getattr(trl, name)
        if not name.startswith("_") and is_available(f"{package}.utils"):
            utilities = vars(importlib.import_module(f"{package}.utils"))
            if name in utilities:
                return utilities[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return module_getattr


def raise_unknown_name(name: str, exported_names: Iterable[str]) -> NoReturn:
    """Raise the error for a name that `trl` does not export, with the closest name that it does.

    It is an AttributeError, so that `hasattr` returns False, except in `from trl import NAME`:
    there Python would replace the message of an AttributeError, so it is an ImportError.
    """
    trainers = ", ".join(export for export in exported_names if export.endswith("Trainer"))
    release_note = f" It is not part of this release, whose trainers are {trainers}."
    # Other methods of Hugging Face TRL have names a letter or two away from those of this release,
    # so only a nearly equal name is suggested.
    hint = did_you_mean(name, exported_names, release_note, cutoff=0.92)
    message = f"module 'trl' has no attribute {name!r}.{hint}"
    from_trl_import = sys._getframe(2).f_code.co_name == "_handle_fromlist"
    if from_trl_import and not is_available(f"trl.{name}"):
        raise ImportError(message.replace("has no attribute", "has no name"), name="trl")
    raise AttributeError(message)
