"""Training commands run through `accelerate launch`; options are told apart before it starts.

The training configuration is not built here: what it checks depends on the number of processes,
which only the workers know.
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from .parser import TrlParser, as_words, read_config

# What accelerate would otherwise guess, and warn about, when it has no configuration.
SINGLE_MACHINE = {"num_machines": "1", "mixed_precision": "no", "dynamo_backend": "no"}

STRATEGIES = {"multi_gpu", "use_deepspeed", "use_fsdp", "tpu", "use_megatron_lm"}


def launch(command: str, words: list[str]) -> None:
    """Start the workers of a training command and wait for them.

    Args:
        command (`str`): name of a module of `trl.scripts`.
        words (`list[str]`): its options and those of `accelerate launch`, mixed.

    Raises:
        SystemExit: with the status of the workers, or 2 for unusable options.
    """
    parser: TrlParser = import_module(f"trl.scripts.{command}").make_parser()
    if {"-h", "--help"} & set(words):
        parser.print_help()
        return
    try:
        script, launcher = split(parser, words)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    names = ["--module", f"trl.scripts.{command}"]
    try:
        launch_command(launch_command_parser().parse_args([*launcher, *names, *script]))
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from None
    except ChildFailedError as error:
        raise SystemExit(error.get_first_failure()[1].exitcode) from None


def split(parser: TrlParser, words: list[str]) -> tuple[list[str], list[str]]:
    """Tell the options of the script from those of `accelerate launch`.

    Args:
        parser: knows the options of the script.
        words: both kinds, mixed; options of the configuration file count too.

    Returns:
        The words for the script, and those for `accelerate launch`.

    Raises:
        ValueError: for an option that neither knows, with the closest names.
    """
    ours: list[str] = []
    theirs: list[str] = []
    for option, values in _groups(words):
        name = option.removeprefix("--").split("=")[0].replace("-", "_")
        (ours if parser.knows(name) else theirs).extend([option, *values])
    theirs = _resolve_accelerate_config([*_words_of_file(parser, ours), *theirs])
    if "--cpu" in theirs:
        ours = [*ours, "--use_cpu"]
    legal = _accelerate_options()
    unknown = [w for w in theirs if w.startswith("--") and _name(w) not in legal]
    if unknown:
        raise ValueError(f"{parser.unknown(unknown, sorted(legal))}.")
    return ours, _with_defaults(theirs)


def _words_of_file(parser: TrlParser, words: list[str]) -> list[str]:
    """What the configuration file holds besides options of the script."""
    path = vars(parser.parse_known_args(words)[0]).get("config")
    config = read_config(path) if path else {}
    return as_words({name: v for name, v in config.items() if not parser.knows(name)})


def _groups(words: list[str]) -> list[tuple[str, list[str]]]:
    """Group each option with the values that follow it."""
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            groups.append((word, []))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise ValueError(f"expected an option that starts with --, not {word!r}.")
    return groups


def _name(option: str) -> str:
    return option.removeprefix("--").split("=")[0].replace("-", "_")


def _accelerate_options() -> set[str]:
    actions: list[argparse.Action] = launch_command_parser()._actions
    return {_name(name) for action in actions for name in action.option_strings}


def _resolve_accelerate_config(words: list[str]) -> list[str]:
    """Replace `--accelerate_config NAME` by the file it stands for."""
    rest: list[str] = []
    path = None
    for option, values in _groups(words):
        if _name(option) != "accelerate_config":
            rest += [option, *values]
            continue
        given = option.split("=", 1)[1] if "=" in option else next(iter(values), None)
        path = _accelerate_config(given)
    return rest if path is None else ["--config_file", path, *rest]


def _accelerate_config(given: str | None) -> str:
    folder = resources.files("trl").joinpath("accelerate_configs")
    shipped = {Path(str(f)).stem: str(f) for f in folder.iterdir() if f.name.endswith(".yaml")}
    if given is None:
        raise ValueError(
            f"--accelerate_config needs a file or one of {', '.join(sorted(shipped))}."
        )
    if Path(given).is_file():
        return given
    if given in shipped:
        return shipped[given]
    close = difflib.get_close_matches(given, shipped, n=1) or sorted(shipped)
    raise ValueError(
        f"--accelerate_config {given}: there is no such file, and no shipped configuration of "
        f"that name (closest: {', '.join(close)})."
    )


def _with_defaults(words: list[str]) -> list[str]:
    """Say what a single machine without a configuration means, so that nothing is guessed."""
    given = {_name(word) for word in words if word.startswith("--")}
    if "config_file" in given or os.path.isfile(default_config_file):
        return words
    defaults: dict[str, Any] = SINGLE_MACHINE | {"num_processes": str(_devices())}
    missing = {name: value for name, value in defaults.items() if name not in given}
    words = [*as_words(missing), *words]
    return words if given & STRATEGIES else _for_several(words)


def _for_several(words: list[str]) -> list[str]:
    """accelerate starts several processes on CPUs only under the name of several GPUs."""
    if _count(words) == 1:
        return words
    return ["--multi_gpu", *(word for word in words if word != "--cpu")]


def _count(words: list[str]) -> int:
    return int(launch_command_parser().parse_args([*words, "script"]).num_processes)


def _devices() -> int:
    import torch

    return max(1, torch.cuda.device_count())
