"""The order and the look of the options that `--help` lists."""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Iterable, Mapping

from .options import Option

TITLES = {
    "PlanArguments": "what is planned",
    "OnlineScriptArguments": "rewards and the memory plan",
    "ScriptArguments": "dataset",
    "RLOOConfig": "RLOO",
    "GRPOConfig": "GRPO",
    "SFTConfig": "SFT",
    "OfflineConfig": "examples and micro-batches",
    "OnlineConfig": "batches, rewards, objective",
    "SamplingOptions": "prompts and sampling",
    "GenerationOptions": "generation with transformers",
    "VLLMOptions": "generation with vLLM",
    "MismatchOptions": "differences between engine and trainer",
    "ToolOptions": "tools",
    "BaseConfig": "training, with the defaults of this package",
    "LoopOptions": "checkpoints, and numbers that are not finite",
    "PolicyOptions": "loading and changing the model",
    "ReferenceOptions": "reference policy",
    "MemoryOptions": "memory",
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


def option_groups(options: Iterable[Option]) -> list[tuple[str, list[Option]]]:
    """Title and options of each class that declares some; those of other packages come last."""
    unique: dict[str, Option] = {}
    for option in options:
        unique.setdefault(option.name, option)
    groups: dict[str, list[Option]] = {}
    for option in sorted(unique.values(), key=lambda option: option.is_foreign):
        groups.setdefault(option.owner, []).append(option)
    return [(title(owner), found) for owner, found in groups.items()]


def title(owner: str) -> str:
    """What the options of a class are called."""
    return TITLES.get(owner, re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", owner).lower())


def short_help(parser: argparse.ArgumentParser, groups: Mapping[str, Iterable[str]]) -> str:
    """Help on some options, in sections with a title."""
    named = {action.dest: action for action in reversed(parser._actions)}
    formatter = parser._get_formatter()
    for name, options in groups.items():
        formatter.start_section(name)
        formatter.add_arguments([named[option] for option in options])
        formatter.end_section()
    return formatter.format_help()
