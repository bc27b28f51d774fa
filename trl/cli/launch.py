"""Training commands run through `accelerate launch`; options are separated before it starts.

Training configurations are built by the workers alone, which know the number of processes.
"""

import argparse
import logging
import os
import signal
import subprocess
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import (
    _validate_launch_command,
    launch_command,
    launch_command_parser,
)
from accelerate.utils import patch_environment
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..imports import is_available, require
from ..process_group import has_accelerator
from .accelerate_file import find_config, read_accelerate_config, shipped_configs
from .exit import exit_like, stopping_on_interrupt
from .options import option_actions
from .parser import INTERRUPTED, TrlParser, as_words, launch_option_names, option_name

# What accelerate would otherwise guess, and warn about, when it has no configuration.
SINGLE_MACHINE = {"num_machines": "1", "mixed_precision": "no", "dynamo_backend": "no"}
LOUD = ("multiprocessing.api", "agent.server.api")  # log ends of workers
SCRIPT = "SCRIPT"  # stands for what is launched while options are checked
NAMED_NO = {"mixed_precision", "dynamo_backend"}  # YAML makes a boolean of their value no
# Options that start several processes.
STRATEGIES = ("multi_gpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "tpu")
STRATEGY_OF_TYPE = {
    "DEEPSPEED": "use_deepspeed",
    "FSDP": "use_fsdp",
    "MEGATRON_LM": "use_megatron_lm",
    "XLA": "tpu",
}
USE_CPU = "ACCELERATE_USE_CPU"  # what workers read


@dataclass
class LaunchRequest:
    """What the words of a command ask of its script and of `accelerate launch`."""

    script: list[str]  # words for the script
    launcher: list[str]  # words for the launcher, with those of the file
    values: dict[str, Any]  # options of the script, those of the file included
    options: argparse.Namespace  # the launcher's words, parsed
    config: dict[str, Any]  # what the accelerate configuration says, if there is one

    @property
    def on_cpu(self) -> bool:
        """Whether workers are told to use CPUs although there may be GPUs."""
        return bool(self.options.cpu or self.values.get("use_cpu") or self.config.get("use_cpu"))

    @property
    def strategy(self) -> str | None:
        """The option of accelerate that starts the workers; None: it starts one."""
        chosen = [name for name in STRATEGIES if getattr(self.options, name)]
        if chosen:
            return chosen[0]
        kind = str(self.config.get("distributed_type", "NO"))
        if kind.startswith("MULTI_") and kind != "MULTI_CPU":
            return "multi_gpu"
        return STRATEGY_OF_TYPE.get(kind)

    @property
    def config_name(self) -> str:
        """The configuration as a user would name it."""
        path = self.options.config_file
        if not path:
            return f"The accelerate configuration {default_config_file}"
        names = {path: name for name, path in shipped_configs().items()}
        return f"--accelerate_config {names.get(path, path)}"


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
    check_thread_count()
    request = read_request(parser, words)
    script, launcher = words_to_start(request)
    needs_deepspeed = values.get("deepspeed") or launch_options(launcher)["use_deepspeed"]
    if needs_deepspeed and not is_available("deepspeed"):
        require("deepspeed", "Training with DeepSpeed")
    check_device(request)
    for name in LOUD:
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    environment = {USE_CPU: "true"} if request.on_cpu else {}
    with stopping_on_interrupt(), patch_environment(**environment):
        options = [*launcher, "--module", f"trl.scripts.{command.replace('-', '_')}", *script]
        launch_command(_launch_parser().parse_args(options))


def check_thread_count() -> None:
    """Refuse a number of threads that is none, which torch ignores and accelerate stumbles over."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None and not (threads.strip().isdecimal() and int(threads) > 0):
        raise ValueError(
            f"OMP_NUM_THREADS={threads!r} in the environment must be a whole number of threads for "
            "each process, at least 1. Set it to one, or unset it."
        )


def check_device(request: LaunchRequest) -> None:
    """Refuse what needs a GPU on a machine without one, unless its CPU is asked for."""
    if request.on_cpu or has_accelerator() or os.environ.get(USE_CPU, "").lower() == "true":
        return
    strategy = request.strategy
    is_chosen_by_option = strategy is not None and getattr(request.options, strategy)
    source = f"--{strategy}" if is_chosen_by_option else request.config_name
    if strategy not in (None, "tpu") or source.endswith(" single_gpu"):
        raise ValueError(
            f"{source} needs a GPU, and this machine has none. On CPUs, use --accelerate_config "
            "multi_cpu (two processes, or --num_processes), or leave it out for one process."
        )


def read_request(parser: TrlParser, words: list[str]) -> LaunchRequest:
    """Tell words for the script, which `parser` knows, from the launcher's; with those in files."""
    script: list[str] = []
    launcher: list[str] = []
    group: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            group = script if parser.knows(option_name(word)) else launcher
        elif group is None:
            raise ValueError(f"expected an option that starts with --, not {word!r}.")
        group.append(word)
    values, from_file, extra = parser.read(script)
    parser.check(extra)
    launcher = [*_words_of_file(from_file), *launcher]
    parser.check(launcher, launch_option_names())
    options = _parsed(launcher)
    if options.num_processes is not None and options.num_processes < 1:
        raise ValueError(f"--num_processes {options.num_processes}: at least one is needed.")
    path = options.config_file or default_config_file
    has_config = bool(options.config_file) or os.path.isfile(path)
    config = read_accelerate_config(path) if has_config else {}
    return LaunchRequest(script, launcher, values, options, config)


def split(parser: TrlParser, words: list[str]) -> tuple[list[str], list[str]]:
    """The words for the script, and those for `accelerate launch`, with nothing left to guess."""
    return words_to_start(read_request(parser, words))


def words_to_start(request: LaunchRequest) -> tuple[list[str], list[str]]:
    """The words for the script, and those for `accelerate launch`, with nothing left to guess."""
    precision = _one_precision(request.values, request.options.mixed_precision)
    launcher = [*request.launcher, *precision]
    # With --cpu, accelerate would start one process, whatever a configuration says.
    portable = [word for word in launcher if word != "--cpu"]
    script = [*request.script, "--use_cpu"] if request.options.cpu else request.script
    if request.config:
        return script, [*_processes_of_config(request), *portable]
    processes, defaults = _defaults(request)
    if processes == 1:
        return script, [*as_words(defaults), *launcher]
    # Accelerate starts several processes on CPUs only under the name of several GPUs.
    several = ["--multi_gpu"] if request.strategy is None else []
    return script, [*several, *as_words(defaults), *portable]


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


def _processes_of_config(request: LaunchRequest) -> list[str]:
    """What lets accelerate start several processes under a configuration that is not for several.

    That is one for several CPUs, or any with --num_processes.
    """
    config, options = request.config, request.options
    is_for_cpus = config.get("distributed_type") == "MULTI_CPU"
    processes = options.num_processes or (config.get("num_processes", 1) if is_for_cpus else 1)
    has_mpi = options.mpirun_hostfile or config.get("mpirun_config")
    return ["--multi_gpu"] if processes > 1 and request.strategy is None and not has_mpi else []


def _defaults(request: LaunchRequest) -> tuple[int, dict[str, Any]]:
    """How many processes a machine without a configuration starts, and options for accelerate."""
    on_one = 1 if request.on_cpu else max(1, torch.cuda.device_count())
    processes = request.options.num_processes or on_one
    options: dict[str, Any] = SINGLE_MACHINE | {"num_processes": processes}
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        # Of a machine without GPUs, accelerate would give each process one core.
        options["num_cpu_threads_per_process"] = max(1, (os.cpu_count() or 1) // processes)
    return processes, options


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
    parser.add_argument(*names, dest="config_file", type=find_config, nargs="?", const="")
    return parser
