"""What is said of options that a command does not know."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from importlib import import_module


def describe_unknown(
    names: Iterable[str], legal: Iterable[str], keys: Mapping[str, str], program: str
) -> str:
    """Say which options are unknown, with what may have been meant.

    Args:
        names: the options, with underscores and without hyphens in front.
        legal: the options there are.
        keys: for options that stand in a file: its path.
        program (`str`): the command that does not know them.

    Returns:
        `str`: without a full stop.
    """
    legal = list(legal)
    places: dict[str | None, list[str]] = {}
    for name in names:
        places.setdefault(keys.get(name), []).append(name)
    parts = []
    for path, found in places.items():
        many = "s" if len(found) > 1 else ""
        start = f"unknown option{many}" if path is None else f"{path}: unknown key{many}"
        dashes = "--" if path is None else ""
        hints = (f"{dashes}{name}{_hint(name, legal, dashes, program)}" for name in found)
        parts.append(f"{start} {', '.join(hints)}")
    return "; ".join(parts)


def _hint(name: str, legal: list[str], dashes: str, program: str) -> str:
    close = difflib.get_close_matches(name, legal, n=3, cutoff=0.6)
    hints = [f"closest: {', '.join(dashes + other for other in close)}"] if close else []
    command = _command_with(name, program)
    hints += [f"an option of `trl {command}`"] if command else []
    return f" ({'; '.join(hints)})" if hints else ""


def _command_with(name: str, program: str) -> str | None:
    """The command of this package that has an option which `program` does not have."""
    if not program.startswith("trl "):
        return None
    # Commands have parsers, which tell of unknown options: this import would be circular above.
    for command in import_module(f"{__package__}.commands").COMMANDS.values():
        if command.name == "env":
            continue
        action = command.option_parser()._option_string_actions.get(f"--{name}")
        if action is not None and action.dest == name:  # no_x has the destination x
            return command.name
    return None
