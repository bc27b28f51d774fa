"""Optional dependencies: imported where they are needed, or an error that says how to get them."""

import importlib
import importlib.util
from types import ModuleType

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
