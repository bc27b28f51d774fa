"""Training commands run through `accelerate launch`; options are separated before it starts.

Training configurations are built by the workers alone, which know the number of processes.
"""

import argparse
import difflib
import logging
import os
import signal
import subprocess
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import torch
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import (
    _validate_launch_command,
    launch_command,
    launch_command_parser,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..imports import is_available, require
from .exit import exit_like, stopping_on_interrupt
from .main import INTERRUPTED
from .options import option_actions
from .parser import TrlParser, as_words, launch_option_names, option_name

# What accelerate would otherwise guess, and warn about, when it has no configuration.
SINGLE_MACHINE = {"num_machines": "1", "mixed_precision": "no", "dynamo_backend": "no"}
LOUD = ("multiprocessing.api", "agent.server.api")  # log ends of workers
SCRIPT = "SCRIPT"  # stands for what is launched while options are checked
NAMED_NO = {"mixed_precision", "dynamo_backend"}  # YAML makes a boolean of their value no
STRATEGIES = {"multi_gpu", "use_deepspeed", "use_fsdp", "tpu", "use_megatron_lm"}


def launch(command: str, parser: TrlParser, words: list[str]) -> None:
    """Start the workers of a training command, wait for them, and end with their status."""
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


def _start(command: str, parser: TrlParser, words: list[str]) -> None:
    values = parser.read(words)[0]
    if values.get("plan"):
        import_module("trl.cli.memory_plan").main([*words, "--method", command])
        return
    script, launcher = split(parser, words)
    needed = values.get("deepspeed") or launch_options(launcher)["use_deepspeed"]
    if needed and not is_available("deepspeed"):
        require("deepspeed", "Training with DeepSpeed")
    for name in LOUD:
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    with stopping_on_interrupt():
        options = [*launcher, "--module", f"trl.scripts.{command.replace('-', '_')}", *script]
        launch_command(_launch_parser().parse_args(options))


def split(parser: TrlParser, words: list[str]) -> tuple[list[str], list[str]]:
    """Tell words for the script, which `parser` knows, from the launcher's; with those in files."""
    ours: list[str] = []
    theirs: list[str] = []
    group: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            group = ours if parser.knows(option_name(word)) else theirs
        elif group is None:
            raise ValueError(f"expected an option that starts with --, not {word!r}.")
        group.append(word)
    given, from_file, extra = parser.read(ours)
    parser.check(extra)
    theirs = [*_words_of_file(from_file), *theirs]
    parser.check(theirs, launch_option_names())
    found = _parsed(theirs)
    if found.num_processes is not None and found.num_processes < 1:
        raise ValueError(f"--num_processes {found.num_processes}: at least one is needed.")
    if found.cpu:
        ours = [*ours, "--use_cpu"]
    theirs += _one_precision(given, found.mixed_precision)
    return ours, _with_defaults(theirs, found, found.cpu or bool(given.get("use_cpu")))


def launch_options(launcher: list[str]) -> dict[str, Any]:
    """The options that words for `accelerate launch`, and the file they name, amount to.

    accelerate merges both in a private function alone; seen in 1.12 to 1.15.
    """
    return vars(_validate_launch_command(_parsed(launcher))[0])


def _words_of_file(values: dict[str, Any]) -> list[str]:
    """Write what the file holds for `accelerate launch` as words; null stands for nothing."""
    legal = launch_option_names()
    actions = option_actions(_launch_parser())
    words: list[str] = []
    for name, value in values.items():
        action = actions.get(f"--{name}")
        if action is not None and action.nargs == 0 and isinstance(value, bool):
            words += [f"--{name}"] * value
        elif value is not None or name not in legal:
            words += as_words({name: "no" if value is False and name in NAMED_NO else value})
    return words


def _one_precision(given: dict[str, Any], precision: str | None) -> list[str]:
    """What lets `--bf16 false` win over what a configuration of accelerate says."""
    if precision in ("bf16", "fp16") and given.get(precision) is False:
        raise ValueError(
            f"--mixed_precision {precision} contradicts --{precision} false; leave one of them out."
        )
    switched_off = given.get("bf16") is False and not given.get("fp16") and precision is None
    return ["--mixed_precision", "no"] if switched_off else []


def _with_defaults(words: list[str], found: argparse.Namespace, on_cpu: bool) -> list[str]:
    """Say what a single machine without a configuration means, so that nothing is guessed."""
    # With --cpu, accelerate would start one process, whatever a configuration says.
    portable = [word for word in words if word != "--cpu"]
    if found.config_file or os.path.isfile(default_config_file):
        return portable
    processes = found.num_processes or (1 if on_cpu else max(1, torch.cuda.device_count()))
    default: dict[str, Any] = SINGLE_MACHINE | {"num_processes": processes}
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        # Of a machine without GPUs, accelerate would give each process one core.
        default["num_cpu_threads_per_process"] = max(1, (os.cpu_count() or 1) // processes)
    if processes == 1:
        return [*as_words(default), *words]
    # It starts several processes on CPUs only under the name of several GPUs.
    has_strategy = any(map(vars(found).get, STRATEGIES))
    return [*["--multi_gpu"] * (not has_strategy), *as_words(default), *portable]


def _parsed(words: list[str]) -> argparse.Namespace:
    """Read options of `accelerate launch`, with mistakes as ValueErrors."""
    try:
        found = _launch_parser().parse_args([*words, "--", SCRIPT])
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}.") from None
    if found.training_script != SCRIPT:
        raise ValueError(f"unexpected words: {found.training_script}.")
    return found


def _launch_parser() -> argparse.ArgumentParser:
    """The parser of `accelerate launch`, which also takes `--accelerate_config NAME`."""
    parser: argparse.ArgumentParser = launch_command_parser()
    parser.exit_on_error = False
    names = ("--accelerate_config", "--accelerate-config")
    parser.add_argument(*names, dest="config_file", type=_accelerate_config, nargs="?", const="")
    return parser


def _accelerate_config(given: str) -> str:
    """The configuration file of a path, or of the name of one that comes with this package."""
    folder = resources.files("trl").joinpath("accelerate_configs")
    shipped = {Path(f.name).stem: str(f) for f in folder.iterdir() if f.name.endswith(".yaml")}
    if Path(given).is_file():
        return given
    if given in shipped:
        return shipped[given]
    names = ", ".join(sorted(shipped))
    if not given:
        raise argparse.ArgumentTypeError(f"give a file, or one of {names}")
    close = difflib.get_close_matches(given, shipped, n=1) or [names]
    words = "there is no such file, and no shipped configuration of that name"
    raise argparse.ArgumentTypeError(f"{given}: {words} (closest: {close[0]})")
