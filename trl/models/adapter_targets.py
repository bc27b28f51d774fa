"""Check that the modules an adapter names are in the model."""

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

from torch import nn
from transformers.utils import logging

from ..suggestions import did_you_mean

if TYPE_CHECKING:
    from peft import PeftConfig

logger = logging.get_logger(__name__)

RESOLVED_BY_PEFT = ("all-linear", "dummy-target-modules")
TYPO = 0.8  # similarity of two names above which one is probably a typo of the other


def check_adapter_modules(model: nn.Module, peft_config: "PeftConfig") -> None:
    """Raise a ValueError if the model has none of the modules an adapter names, or for a typo.

    Lists of names often serve several architectures, so other missing names only cause a warning.
    """
    module_names = {
        "target_modules": getattr(peft_config, "target_modules", None),
        "modules_to_save": getattr(peft_config, "modules_to_save", None),
    }
    for option, names in module_names.items():
        if not names or str(names).lower() in RESOLVED_BY_PEFT:
            continue
        try:
            missing = _missing(names, model)
        except re.error as error:
            raise ValueError(
                f"{option} (--lora_{option}): {names!r} is no regular expression ({error}). For "
                "names of modules give a list."
            ) from None
        if not missing:
            continue
        message = _no_module(option, missing, model)
        if isinstance(names, str) or len(missing) == len(names):
            raise ValueError(message)
        if _has_typo(missing, set(names), model):
            raise ValueError(message)
        logger.warning(message)


def _missing(names: str | Collection[str], model: nn.Module) -> list[str]:
    """Return the names, or the regular expression, that match no module."""
    paths = [path for path, _ in model.named_modules() if path]
    if isinstance(names, str):
        return [] if any(re.fullmatch(names, path) for path in paths) else [names]
    return sorted(name for name in names if not _is_in(name, paths))


def _has_typo(missing: list[str], names: set[str], model: nn.Module) -> bool:
    """Whether a missing name is similar to that of a module that the list does not name."""
    unnamed = set(_modules_with_matrices(model)) - names
    return any(get_close_matches(name, unnamed, cutoff=TYPO) for name in missing)


def _is_in(name: str, paths: Iterable[str]) -> bool:
    """Whether the path of some module is this name or ends with it."""
    return any(path == name or path.endswith(f".{name}") for path in paths)


def _no_module(option: str, missing: list[str], model: nn.Module) -> str:
    """Return an error text: which modules are missing, the most similar, and all candidates."""
    modules = _modules_with_matrices(model)
    listed = split_names(missing[0])
    if all(name in modules for name in listed):
        hint = f" A string is a regular expression of whole paths; for names give a list: {listed}."
    else:
        hint = did_you_mean(missing[0], modules)
    names = " or ".join(map(repr, missing))
    return (
        f"{option} (--lora_{option}): the model has no module {names}.{hint} Modules with weight "
        f"matrices are {', '.join(modules)}."
    )


def split_names(text: str) -> list[str]:
    """Split a list of names such as "q_proj, v_proj"; a regular expression stays whole."""
    is_list = re.fullmatch(r"[\w.\s,]+", text)
    return [name for name in re.split(r"[\s,]+", text) if name] if is_list else [text]


def _modules_with_matrices(model: nn.Module) -> list[str]:
    """Return the distinct last components of the paths of modules with a weight matrix."""
    names: dict[str, None] = {}
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.dim() == 2:
            names[path.rpartition(".")[2]] = None
    return list(names)
