"""Reward functions by the names a user writes on the command line."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import rewards
from ..text import did_you_mean

OVERLONG = {"max_completion_len": 1280, "soft_punish_cache": 256}


def known_rewards() -> dict[str, Callable[..., Any]]:
    """Reward functions that can be named without their module."""
    return {
        "accuracy_reward": rewards.accuracy_reward,
        "reasoning_accuracy_reward": rewards.reasoning_accuracy_reward,
        "think_format_reward": rewards.think_format_reward,
        "get_soft_overlong_punishment": rewards.get_soft_overlong_punishment(**OVERLONG),
    }


def find_reward(name: str) -> Callable[..., Any]:
    """Find a reward function: a known name, `package.module.function`, or `file.py:function`.

    The current folder is searched first.

    Raises:
        ValueError: if there is no such function, with the closest; if its module fails, with the
            place.
    """
    known = known_rewards()
    if name in known:
        return known[name]
    if ".py:" in name:
        path, _, attribute = name.rpartition(":")
        return _attribute(_load_file(path), attribute, name)
    if "." in name:
        module, _, attribute = name.rpartition(".")
        return _attribute(_load_module(module, name), attribute, name)
    hint = did_you_mean(name, known, otherwise=f" Known names: {', '.join(known)}.")
    raise ValueError(f"--reward_funcs {name}: no such reward function.{hint}")


def _load_module(module: str, name: str) -> Any:
    folder = os.getcwd()
    if sys.path[0] != folder:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module)
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and module.startswith(absent):
            raise ValueError(
                f"--reward_funcs {name}: there is no module {absent!r} in {folder} or among "
                "the installed packages."
            ) from error
        raise _failure(name, error) from error


def _load_file(path: str) -> Any:
    if not Path(path).is_file():
        raise ValueError(f"--reward_funcs {path}: there is no such file.")
    # The name under which the file can be imported, so that workers can pickle its functions.
    name = Path(path).stem
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules.setdefault(name, module)
    try:
        exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), vars(module))
    except Exception as error:
        raise _failure(path, error) from error
    return module


def _failure(name: str, error: Exception) -> ValueError:
    """What is said of a module that cannot be loaded: what failed, and where."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
    return ValueError(
        f"--reward_funcs {name}: loading it failed: {type(error).__name__}: {error}{place}."
    )


def _attribute(module: Any, attribute: str, name: str) -> Callable[..., Any]:
    found = getattr(module, attribute, None)
    if callable(found):
        return found
    functions = [key for key, value in vars(module).items() if callable(value)]
    hint = did_you_mean(attribute, functions)
    raise ValueError(
        f"--reward_funcs {name}: {module.__name__} has no function {attribute!r}.{hint}"
    )
