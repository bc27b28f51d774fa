"""The order and the look of the options that `--help` lists."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import re
from collections.abc import Iterable

TITLES = {
    "PlanArguments": "what is planned",
    "OnlineScriptArguments": "rewards and the memory plan",
    "ScriptArguments": "dataset",
    "RLOOConfig": "RLOO",
    "GRPOConfig": "GRPO",
    "OnlineConfig": "sampling, rewards, batches, reference policy, engine",
    "MismatchConfig": "differences between engine and trainer",
    "AgentConfig": "tools",
    "BaseConfig": "training, with the defaults of this package",
    "ModelConfig": "model, adapter and quantization",
    "DatasetMixtureConfig": "mixture of datasets",
    "TrainingArguments": "training (options of transformers.TrainingArguments)",
}


class OptionHelp(argparse.HelpFormatter):
    """Shows each option with underscores; the spelling with hyphens need not be listed."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        words = action.option_strings
        others = {f"--{word[2:].replace('_', '-')}" for word in words if "_" in word}
        shown = copy.copy(action)
        shown.option_strings = [word for word in words if word not in others]
        return super()._format_action_invocation(shown)


def option_groups(
    dataclass_types: Iterable[type],
) -> list[tuple[str, list[tuple[type, dataclasses.Field]]]]:
    """Sort the options of dataclasses by the class that declares them.

    Returns:
        Title and options of each group, an option with the dataclass it is taken from: first those
        of each dataclass and of its bases in the same package, then those of other packages.
    """
    groups: dict[type, list[tuple[type, dataclasses.Field]]] = {}
    foreign: dict[type, bool] = {}
    seen: set[str] = set()
    for kind in dataclass_types:
        left = {x.name: x for x in dataclasses.fields(kind) if x.init and x.name not in seen}
        seen |= left.keys()
        for owner in kind.__mro__:
            names = [name for name in inspect.get_annotations(owner) if name in left]
            if names:
                groups.setdefault(owner, []).extend((kind, left.pop(name)) for name in names)
                foreign.setdefault(owner, _package(owner) != _package(kind))
    return [(title(owner), groups[owner]) for owner in sorted(groups, key=foreign.__getitem__)]


def title(kind: type) -> str:
    """What the options of a class are called."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", kind.__name__).lower()
    return TITLES.get(kind.__name__, words)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
