"""Start the workers of a training command through `accelerate launch`.

The options of the script and of the launcher are separated first. Only the workers build training
configurations, because only they know the number of processes.
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
from .argv import launch_option_names, option_name, to_argv
from .exit import exit_like_worker, stopping_on_interrupt
from .options import option_actions
from .parser import INTERRUPTED, TrlParser

# Without a configuration, accelerate would guess these options and warn about it.
SINGLE_MACHINE = {"num_machines": "1", "mixed_precision": "no", "dynamo_backend": "no"}
# Loggers of torch.distributed.elastic that report the end of workers, which `exit` reports itself.
SILENCED_LOGGERS = ("multiprocessing.api", "agent.server.api")
SCRIPT_PLACEHOLDER = "SCRIPT"  # stands for the training script while launcher options are parsed
# Options for which "no" is a legal value. YAML reads it as False.
OPTIONS_WITH_NO = {"mixed_precision", "dynamo_backend"}
# Options of accelerate that start several processes.
STRATEGIES = ("multi_gpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "tpu")
STRATEGY_OF_DISTRIBUTED_TYPE = {
    "DEEPSPEED": "use_deepspeed",
    "FSDP": "use_fsdp",
    "MEGATRON_LM": "use_megatron_lm",
    "XLA": "tpu",
}
USE_CPU = "ACCELERATE_USE_CPU"  # environment variable that workers read


@dataclass
class LaunchRequest:
    """The arguments of a command, divided between its script and `accelerate launch`."""

    script_argv: list[str]
    launcher_argv: list[str]  # including launcher options from the file of --config
    values: dict[str, Any]  # options of the script, including those from the file
    launcher_options: argparse.Namespace  # `launcher_argv`, parsed
    accelerate_config: dict[str, Any]  # contents of the accelerate configuration, if there is one

    @property
    def on_cpu(self) -> bool:
        """Whether the user asked for CPUs, even if there are GPUs."""
        return bool(
            self.launcher_options.cpu
            or self.values.get("use_cpu")
            or self.accelerate_config.get("use_cpu")
        )

    @property
    def strategy(self) -> str | None:
        """The option of accelerate by which it starts several workers; None if it starts one."""
        options = vars(self.launcher_options)
        for name in STRATEGIES:
            if options[name]:
                return name
        distributed_type = str(self.accelerate_config.get("distributed_type", "NO"))
        if distributed_type.startswith("MULTI_") and distributed_type != "MULTI_CPU":
            return "multi_gpu"
        return STRATEGY_OF_DISTRIBUTED_TYPE.get(distributed_type)

    @property
    def config_name(self) -> str:
        """The accelerate configuration as the user would name it."""
        path = self.launcher_options.config_file
        if not path:
            return f"The accelerate configuration {default_config_file}"
        shipped_names = {path: name for name, path in shipped_configs().items()}
        return f"--accelerate_config {shipped_names.get(path, path)}"


@dataclass(frozen=True)
class LaunchArguments:
    """The final arguments of the training script and of `accelerate launch`."""

    script_argv: list[str]
    launcher_argv: list[str]


def launch(command: str, parser: TrlParser, argv: list[str]) -> None:
    """Start the workers of a training command, wait for them, and end with their exit status."""
    try:
        _start_workers(command, parser, argv)
    except KeyboardInterrupt:
        parser.exit(INTERRUPTED)
    except SignalException as error:
        interrupted = error.sigval == signal.SIGINT
        exit_like_worker(parser, 0, INTERRUPTED if interrupted else -error.sigval)
    except subprocess.CalledProcessError as error:
        exit_like_worker(parser, 0, error.returncode)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        exit_like_worker(parser, rank, failure.exitcode)
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("TRL_DEBUG") == "1":
            raise
        parser.error(" ".join(str(error).split()))


def _start_workers(command: str, parser: TrlParser, argv: list[str]) -> None:
    values = parser.read(argv).values
    check_thread_count()
    request = read_request(parser, argv)
    arguments = launch_arguments(request)
    launcher_options = launch_options(arguments.launcher_argv)
    needs_deepspeed = values.get("deepspeed") or launcher_options["use_deepspeed"]
    if needs_deepspeed and not is_available("deepspeed"):
        require("deepspeed", "Training with DeepSpeed")
    check_device(request)
    for name in SILENCED_LOGGERS:
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    environment = {USE_CPU: "true"} if request.on_cpu else {}
    with stopping_on_interrupt(), patch_environment(**environment):
        module = f"trl.scripts.{command.replace('-', '_')}"
        full_argv = [*arguments.launcher_argv, "--module", module, *arguments.script_argv]
        launch_command(_launch_parser().parse_args(full_argv))


def check_thread_count() -> None:
    """Raise a ValueError if OMP_NUM_THREADS is not a number, which torch ignores without a word."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None and not (threads.strip().isdecimal() and int(threads) > 0):
        raise ValueError(
            f"OMP_NUM_THREADS={threads!r} in the environment must be a whole number of threads for "
            "each process, at least 1. Set it to one, or unset it."
        )


def check_device(request: LaunchRequest) -> None:
    """Raise a ValueError if the launch needs a GPU, but the machine has none."""
    if request.on_cpu or has_accelerator() or os.environ.get(USE_CPU, "").lower() == "true":
        return
    strategy = request.strategy
    is_chosen_by_option = strategy is not None and vars(request.launcher_options)[strategy]
    source = f"--{strategy}" if is_chosen_by_option else request.config_name
    if strategy not in (None, "tpu") or source.endswith(" single_gpu"):
        raise ValueError(
            f"{source} needs a GPU, and this machine has none. On CPUs, use --accelerate_config "
            "multi_cpu (two processes, or --num_processes), or leave it out for one process."
        )


def read_request(parser: TrlParser, argv: list[str]) -> LaunchRequest:
    """Divide arguments between the script, whose options `parser` knows, and the launcher.

    Options of the launcher in the file of --config are included.

    Raises:
        ValueError: an option is unknown to both, or has an illegal value.
    """
    script_argv: list[str] = []
    launcher_argv: list[str] = []
    current: list[str] | None = None
    for argument in argv:
        if argument.startswith("--"):
            is_script_option = parser.knows(option_name(argument))
            current = script_argv if is_script_option else launcher_argv
        elif current is None:
            raise ValueError(f"expected an option that starts with --, not {argument!r}.")
        current.append(argument)
    parsed = parser.read(script_argv)
    parser.check_unknown(parsed.unknown_argv)
    launcher_argv = [*_launcher_argv_from_file(parsed.unknown_config), *launcher_argv]
    parser.check_unknown(launcher_argv, launch_option_names())
    options = _parse_launcher_argv(launcher_argv)
    if options.num_processes is not None and options.num_processes < 1:
        raise ValueError(f"--num_processes {options.num_processes}: at least one is needed.")
    path = options.config_file or default_config_file
    has_config = bool(options.config_file) or os.path.isfile(path)
    return LaunchRequest(
        script_argv=script_argv,
        launcher_argv=launcher_argv,
        values=parsed.values,
        launcher_options=options,
        accelerate_config=read_accelerate_config(path) if has_config else {},
    )


def launch_arguments(request: LaunchRequest) -> LaunchArguments:
    """Return the arguments of script and launcher, with all options that accelerate would guess."""
    precision_argv = _precision_argv(request.values, request.launcher_options.mixed_precision)
    launcher_argv = [*request.launcher_argv, *precision_argv]
    # With --cpu, accelerate would start a single process, whatever its configuration says.
    launcher_argv_without_cpu = [argument for argument in launcher_argv if argument != "--cpu"]
    script_argv = request.script_argv
    if request.launcher_options.cpu:
        script_argv = [*script_argv, "--use_cpu"]
    if request.accelerate_config:
        several_argv = _several_processes_argv(request)
        return LaunchArguments(script_argv, [*several_argv, *launcher_argv_without_cpu])
    defaults = _default_options(request)
    if defaults["num_processes"] == 1:
        return LaunchArguments(script_argv, [*to_argv(defaults), *launcher_argv])
    # accelerate starts several processes on CPUs only with the option for several GPUs.
    several_argv = ["--multi_gpu"] if request.strategy is None else []
    return LaunchArguments(
        script_argv, [*several_argv, *to_argv(defaults), *launcher_argv_without_cpu]
    )


def split_arguments(parser: TrlParser, argv: list[str]) -> LaunchArguments:
    """Return the arguments that `launch` would give to the script and to `accelerate launch`."""
    return launch_arguments(read_request(parser, argv))


def launch_options(launcher_argv: list[str]) -> dict[str, Any]:
    """Return the options of `accelerate launch` after it has merged its configuration into them.

    accelerate does this in a private function, checked in 1.12 to 1.15.
    """
    return vars(_validate_launch_command(_parse_launcher_argv(launcher_argv))[0])


def _launcher_argv_from_file(values: dict[str, Any]) -> list[str]:
    """Write the launcher options of a file as arguments, without those that are null."""
    legal_names = launch_option_names()
    actions = option_actions(_launch_parser())
    argv: list[str] = []
    for name, value in values.items():
        action = actions.get(f"--{name}")
        is_flag = action is not None and action.nargs == 0
        if is_flag and isinstance(value, bool):
            if value:
                argv.append(f"--{name}")
        elif value is not None or name not in legal_names:
            is_no = value is False and name in OPTIONS_WITH_NO
            argv += to_argv({name: "no" if is_no else value})
    return argv


def _precision_argv(values: dict[str, Any], precision: str | None) -> list[str]:
    """Return the option by which `--bf16 false` overrides the accelerate configuration."""
    if precision in ("bf16", "fp16") and values.get(precision) is False:
        raise ValueError(
            f"--mixed_precision {precision} contradicts --{precision} false; leave one of them out."
        )
    is_switched_off = values.get("bf16") is False and not values.get("fp16") and precision is None
    return ["--mixed_precision", "no"] if is_switched_off else []


def _several_processes_argv(request: LaunchRequest) -> list[str]:
    """Return the option by which accelerate starts several processes despite its configuration.

    It is needed for a configuration of several CPUs, and for any other configuration of a single
    process with --num_processes.
    """
    config = request.accelerate_config
    options = request.launcher_options
    processes = options.num_processes or 1
    if options.num_processes is None and config.get("distributed_type") == "MULTI_CPU":
        processes = config.get("num_processes", 1)
    uses_mpi = options.mpirun_hostfile or config.get("mpirun_config")
    is_needed = processes > 1 and request.strategy is None and not uses_mpi
    return ["--multi_gpu"] if is_needed else []


def _default_options(request: LaunchRequest) -> dict[str, Any]:
    """Return options for accelerate on a machine without a configuration."""
    default_processes = 1 if request.on_cpu else max(1, torch.cuda.device_count())
    processes = request.launcher_options.num_processes or default_processes
    options: dict[str, Any] = SINGLE_MACHINE | {"num_processes": processes}
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        # On a machine without GPUs, accelerate would give each process a single core.
        options["num_cpu_threads_per_process"] = max(1, (os.cpu_count() or 1) // processes)
    return options


def _parse_launcher_argv(launcher_argv: list[str]) -> argparse.Namespace:
    """Parse options of `accelerate launch`; errors are ValueErrors."""
    try:
        options = _launch_parser().parse_args([*launcher_argv, "--", SCRIPT_PLACEHOLDER])
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}.") from None
    if options.training_script != SCRIPT_PLACEHOLDER:
        raise ValueError(f"unexpected words: {options.training_script}.")
    return options


def _launch_parser() -> argparse.ArgumentParser:
    """Return the parser of `accelerate launch`, extended by `--accelerate_config NAME`."""
    parser: argparse.ArgumentParser = launch_command_parser()
    parser.exit_on_error = False
    parser.add_argument(
        "--accelerate_config",
        "--accelerate-config",
        dest="config_file",
        type=find_config,
        nargs="?",
        const="",
    )
    return parser
