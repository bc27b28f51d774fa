"""Training commands run through `accelerate launch`; options are told apart before it starts.

The training configuration is not built here: what it checks depends on the number of processes,
which only the workers know.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import signal
import subprocess
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..imports import is_available, require
from .config_file import read_config
from .launch_words import check_launch_options, launch_option_names, option_name
from .main import INTERRUPTED
from .parser import OptionParser, as_words
from .processes import exit_like, stopping_on_interrupt

# What accelerate would otherwise guess, and warn about, when it has no configuration.
SINGLE_MACHINE = {"num_machines": "1", "mixed_precision": "no", "dynamo_backend": "no"}


ELASTIC = "torch.distributed.elastic"
LOUD = (f"{ELASTIC}.multiprocessing.api", f"{ELASTIC}.agent.server.api")  # log ends of workers

SCRIPT = "SCRIPT"  # stands for what is launched while options are checked

NAMED_NO = {"mixed_precision", "dynamo_backend"}  # YAML makes a boolean of their value no

STRATEGIES = {"multi_gpu", "use_deepspeed", "use_fsdp", "tpu", "use_megatron_lm"}


def launch(command: str, parser: OptionParser, words: list[str]) -> None:
    """Start the workers of a training command and wait for them.

    Args:
        command (`str`): name of a module of `trl.scripts`.
        parser: knows the options of the command.
        words (`list[str]`): its options and those of `accelerate launch`, mixed.

    Raises:
        SystemExit: with the status of the workers, or 2 for unusable options.
    """
    try:
        _start(command, parser, words)
    except KeyboardInterrupt:
        parser.exit(INTERRUPTED)
    except SignalException as error:
        exit_like(parser, 0, -error.sigval if error.sigval != signal.SIGINT else INTERRUPTED)
    except subprocess.CalledProcessError as error:
        exit_like(parser, 0, error.returncode)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        exit_like(parser, rank, failure.exitcode)
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("TRL_DEBUG") == "1":
            raise
        parser.error(" ".join(str(error).split()))


def _start(command: str, parser: OptionParser, words: list[str]) -> None:
    values = parser.read(words)[0]
    if values.get("plan"):
        import_module("trl.cli.memory_plan").main([*words, "--method", command])
        return
    script, launcher = split(parser, words)
    _check_packages(values, launcher)
    options = [*launcher, "--module", f"trl.scripts.{command}", *script]
    for name in LOUD:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with stopping_on_interrupt():
        launch_command(launch_command_parser().parse_args(options))


def _check_packages(values: dict[str, Any], launcher: list[str]) -> None:
    """Check that what the launch needs is installed.

    Raises:
        ImportError: naming the extra.
    """
    needed = values.get("deepspeed") or launch_options(launcher)["use_deepspeed"]
    if needed and not is_available("deepspeed"):
        require("deepspeed", "Training with DeepSpeed")


def split(parser: OptionParser, words: list[str]) -> tuple[list[str], list[str]]:
    """Tell the options of the script from those of `accelerate launch`.

    Args:
        parser: knows the options of the script.
        words: both kinds, mixed; options of the configuration file count too.

    Returns:
        The words for the script, and those for `accelerate launch`.

    Raises:
        ValueError: for an option that neither knows, with the closest names, and for a value that
            does not fit its option.
    """
    ours: list[str] = []
    theirs: list[str] = []
    for option, values in _groups(words):
        (ours if parser.knows(option_name(option)) else theirs).extend([option, *values])
    given, _, extra = parser.read(ours)
    if extra:
        raise ValueError(f"{parser.unknown(extra)}.")
    from_file = _entries_of_file(parser, ours, set(given))
    theirs = _resolve_accelerate_config([*_words_of_file(from_file), *theirs])
    if "--cpu" in theirs:
        ours = [*ours, "--use_cpu"]
    check_launch_options(parser, theirs)
    found = _parsed(theirs)
    if found.num_processes is not None and found.num_processes < 1:
        raise ValueError(f"--num_processes {found.num_processes}: at least one is needed.")
    theirs = _in_one_precision(given, theirs, found.mixed_precision)
    return ours, _with_defaults(theirs, on_cpu="--cpu" in theirs or bool(given.get("use_cpu")))


def _in_one_precision(
    given: dict[str, Any], launcher: list[str], precision: str | None
) -> list[str]:
    """Let `--bf16 false` win over what a configuration of accelerate says.

    Raises:
        ValueError: if `--mixed_precision` asks for what is switched off.
    """
    if precision in ("bf16", "fp16") and given.get(precision) is False:
        raise ValueError(
            f"--mixed_precision {precision} contradicts --{precision} false; leave one of them out."
        )
    if given.get("bf16") is False and not given.get("fp16") and precision is None:
        return [*launcher, "--mixed_precision", "no"]
    return launcher


def launch_options(launcher: list[str]) -> dict[str, Any]:
    """What words for `accelerate launch` and the configuration file they name come to.

    Returns:
        Options by name: those of the file, its `fsdp_config` and `deepspeed_config` among them,
        then those that the words give. `use_deepspeed` and `use_fsdp` are always there, and so are
        `num_processes` and `num_machines`, counted over all machines.
    """
    found = _parsed(launcher)
    file = found.config_file or (default_config_file if os.path.isfile(default_config_file) else "")
    options = _options_of_config(load_config_from_file(file)) if file else {}
    given = {option_name(word) for word, _ in _groups(launcher)} & vars(found).keys()
    if given & STRATEGIES:
        options |= dict.fromkeys(STRATEGIES, False)
    options |= {name: getattr(found, name) for name in given}
    for name in ("num_processes", "num_machines"):
        options[name] = int(options.get(name) or 1)
    return {"use_deepspeed": False, "use_fsdp": False} | options


def _options_of_config(config: Any) -> dict[str, Any]:
    kind = config.distributed_type.value
    options = {name: value for name, value in vars(config).items() if not isinstance(value, dict)}
    for name, values in vars(config).items():
        if name in ("deepspeed_config", "fsdp_config") and values:
            options |= values
    return options | {"use_deepspeed": kind == "DEEPSPEED", "use_fsdp": kind == "FSDP"}


def num_processes(launcher: list[str]) -> int:
    """How many processes the words for `accelerate launch` start, on all machines."""
    return int(launch_options(launcher)["num_processes"])


def _entries_of_file(parser: OptionParser, words: list[str], ours: set[str]) -> dict[str, Any]:
    """What the configuration file holds besides options of the script."""
    path = vars(parser.parse_known_args(words)[0]).get("config")
    config = read_config(path) if path else {}
    return {name: value for name, value in config.items() if name not in ours}


def _words_of_file(values: dict[str, Any]) -> list[str]:
    """Write what the file holds for `accelerate launch` as words; null stands for nothing."""
    legal = launch_option_names()
    flags = {name for name, action in _accelerate_actions().items() if action.nargs == 0}
    words: list[str] = []
    for name, value in values.items():
        if name in flags and isinstance(value, bool):
            words += [f"--{name}"] * value
        elif value is not None or name not in legal:
            words += as_words({name: "no" if value is False and name in NAMED_NO else value})
    return words


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


def _accelerate_actions() -> dict[str, argparse.Action]:
    actions: list[argparse.Action] = launch_command_parser()._actions
    named = {word: action for action in actions for word in action.option_strings}
    return {option_name(word): action for word, action in named.items() if word.startswith("--")}


def _resolve_accelerate_config(words: list[str]) -> list[str]:
    """Replace `--accelerate_config NAME` by the file it stands for."""
    rest: list[str] = []
    path = None
    for option, values in _groups(words):
        if option_name(option) != "accelerate_config":
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


def _with_defaults(words: list[str], on_cpu: bool) -> list[str]:
    """Say what a single machine without a configuration means, so that nothing is guessed."""
    given = {option_name(word) for word in words if word.startswith("--")}
    if "config_file" in given or os.path.isfile(default_config_file):
        return words
    defaults = SINGLE_MACHINE | {"num_processes": 1 if on_cpu else _devices()}
    words = [*as_words(defaults), *words]
    return words if given & STRATEGIES else _for_several(words)


def _for_several(words: list[str]) -> list[str]:
    """accelerate starts several processes on CPUs only under the name of several GPUs."""
    if int(_parsed(words).num_processes) == 1:
        return words
    return ["--multi_gpu", *(word for word in words if word != "--cpu")]


def _parsed(words: list[str]) -> argparse.Namespace:
    """Read options of `accelerate launch`, with mistakes as ValueErrors."""
    parser = launch_command_parser()
    parser.exit_on_error = False
    try:
        found = parser.parse_args([*words, "--", SCRIPT])
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}.") from None
    if found.training_script != SCRIPT:
        raise ValueError(f"unexpected words: {found.training_script}.")
    return found


def _devices() -> int:
    import torch

    return max(1, torch.cuda.device_count())
