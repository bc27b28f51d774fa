"""How training commands end: their messages, their exit status, and the end of their workers."""

import ast
import json
import os
import re
import shlex
import signal
import sys
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, NoReturn

import psutil

from ..json_files import without_surrogates
from ..trainer.base.checkpoint import checkpoints_in
from ..trainer.base.run_lock import check_free
from .parser import INTERRUPTED, OneLineParser

if TYPE_CHECKING:
    from transformers import Trainer

# Errors that are shown without the name of their class. RuntimeError is what torch and transformers
# raise for weights of a wrong shape and for too little memory.
USER_ERRORS = (ValueError, TypeError, ImportError, OSError, RuntimeError)
USER_ERROR_STATUS = 2  # exit status of a worker that has reported an error itself
MAIN_RANK_FIRST = 30.0  # seconds that other ranks wait for rank 0 to report the same error
# Seconds after which a worker that still runs was probably not interrupted by the terminal.
TERMINAL_SECONDS = 2.0
GRACE_SECONDS = 60.0  # seconds in which an interrupted worker should end


def rank() -> int:
    """Return the rank of this process; 0 if it was not launched with others."""
    return int(os.environ.get("RANK", "0"))


@contextmanager
def one_line_errors(parser: OneLineParser, trainer: "Trainer | None" = None) -> Iterator[None]:
    """Report an error or Ctrl-C in one line that says how to continue, and end the process.

    The exit status is 130 after Ctrl-C and 2 after an error. With TRL_DEBUG=1 in the environment,
    the error is raised instead, with its traceback. If a `trainer` is given, the traceback is also
    written to a file in its output folder.
    """
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends this process at once
        if rank() == 0:
            progress = _training_progress(trainer)
            print(f"{parser.prog}: interrupted {progress}", file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        if os.environ.get("TRL_DEBUG") == "1":
            raise
        sentences = [as_command_line(describe(error), parser.all_names)]
        if trainer is not None:
            if trainer.state.global_step:
                sentences.append(f"This was {_training_progress(trainer)}")
            sentences += _write_traceback(str(trainer.args.output_dir))
        if rank() > 0:
            # Rank 0 usually reports the same error, and its end ends the other ranks.
            time.sleep(MAIN_RANK_FIRST)
            sentences.append(f"(process {rank()})")
        text = without_surrogates(" ".join(filter(None, sentences)))
        print(f"{parser.prog}: error: {text}", file=sys.stderr, flush=True)
        raise SystemExit(USER_ERROR_STATUS) from None


def _write_traceback(folder: str) -> list[str]:
    """Write the traceback of the current exception to a file; return a sentence that names it."""
    file = Path(folder, f"error-{rank()}.txt" if rank() else "error.txt")
    try:
        file.write_text(without_surrogates(traceback.format_exc()), encoding="utf-8")
    except OSError:
        return []
    return [f"The trace is in {file}."]


def describe(error: BaseException) -> str:
    """Describe an error in one line, with the name of its class unless it is a `USER_ERRORS`.

    A list in the message keeps a line for each entry, and the text after it starts a new line.
    """
    text = _join_lines(str(error))
    if isinstance(error, USER_ERRORS) and text:
        return text
    return f"{type(error).__name__}: {text}".rstrip(": ")


def _join_lines(text: str) -> str:
    """Join the lines of a text, except for entries of a list, which start with a hyphen."""
    lines: list[str] = []
    continues = False
    for line in filter(None, map(str.strip, text.splitlines())):
        line = " ".join(line.split())
        is_entry = bool(lines) and line.startswith("- ")
        if is_entry:
            lines.append(f"  {line}")
        elif continues:
            lines[-1] += f" {line}"
        else:
            lines.append(line)
        continues = not is_entry
    return "\n".join(lines)


def as_command_line(text: str, names: Iterable[str]) -> str:
    """Rewrite options in a message, such as `beta=0.1`, as they are given in a shell: `--beta 0.1`.

    Args:
        names: the options of the command.
    """
    name_pattern = "|".join(sorted(names, key=len, reverse=True))
    value_pattern = r"""('[^']*'|"[^"]*"|\{[^}]*\}|\([^)]*\)|\[[^\]]*\]|[-+\w/]+(?:\.\w+)*)"""

    def rewrite(option: re.Match[str]) -> str:
        return f"--{option[1]} {_shell_value(option[2])}"

    if not name_pattern:
        return text
    return re.sub(rf"(?<![\w.-])({name_pattern})={value_pattern}", rewrite, text)


def _shell_value(literal: str) -> str:
    """Write a Python literal as the value of an option in a shell. Text keeps its quotes."""
    if literal in ("True", "False", "None"):
        return literal.lower()
    try:
        value = ast.literal_eval(literal)
    except (ValueError, SyntaxError):
        return literal
    if isinstance(value, dict):
        return shlex.quote(json.dumps(value))
    if isinstance(value, list | tuple) and value:
        return " ".join(shlex.quote(str(entry)) for entry in value)
    return literal


def _training_progress(trainer: "Trainer | None") -> str:
    """Return after how many steps training stopped, with the newest checkpoint."""
    if trainer is None:
        return "before training began."
    state = trainer.state
    folder = str(trainer.args.output_dir)
    steps = f"after {state.global_step} of {state.max_steps} steps."
    checkpoints = checkpoints_in(folder)
    if not checkpoints:
        return f"{steps} There is no checkpoint in {folder}."
    advice = "; to continue from there, repeat the command with --resume_from_checkpoint true"
    if trainer.args.save_only_model:
        advice = ""
    return f"{steps} The newest checkpoint is {checkpoints[0]}{advice}."


def print_success(trainer: "Trainer") -> None:
    """Print how many steps are done, and the folder of the model."""
    if trainer.is_world_process_zero():
        steps = f"{trainer.state.global_step} of {trainer.state.max_steps} steps done"
        print(f"{steps}; the model is in {trainer.args.output_dir}.", flush=True)


def check_output_dir(folder: str) -> None:
    """Raise a ValueError if a folder, which need not exist yet, is in use or cannot be written."""
    existing = Path(folder).absolute()
    try:
        while not os.path.lexists(existing):
            existing = existing.parent
        if not existing.is_dir():
            raise NotADirectoryError(None, "it is not a folder")
        with TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(
            f"--output_dir {folder}: nothing can be written in {existing}: {error.strerror}."
        ) from None
    check_free(folder)


@contextmanager
def stopping_on_interrupt() -> Iterator[None]:
    """On Ctrl-C, wait until the processes that were started inside the block have ended.

    A terminal interrupts them together with this process. If only this process was interrupted, the
    workers still run after a moment: they are interrupted, and killed if that does not end them.
    A second Ctrl-C ends the wait.
    """
    children_before = set(psutil.Process().children())
    try:
        yield
    except KeyboardInterrupt:
        workers = list(set(psutil.Process().children()) - children_before)
        with suppress(KeyboardInterrupt):
            _, running = psutil.wait_procs(workers, timeout=TERMINAL_SECONDS)
            _send_signal(signal.SIGINT, running)
            psutil.wait_procs(running, timeout=GRACE_SECONDS)
        _send_signal(signal.SIGKILL, workers)
        raise


def _send_signal(signal_number: signal.Signals, workers: Iterable[psutil.Process]) -> None:
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            worker.send_signal(signal_number)


def exit_like_worker(parser: ArgumentParser, rank: int, status: int) -> NoReturn:
    """End this process with the status of a worker, and say how the worker ended.

    Nothing is printed if the worker has reported its error, or was interrupted.

    Args:
        status: exit status of the worker; minus the signal's number if a signal ended it.
    """
    if status in (USER_ERROR_STATUS, INTERRUPTED):
        parser.exit(status)
    if status >= 0:
        parser.exit(status, f"{parser.prog}: error: process {rank} ended with status {status}.\n")
    name = signal.Signals(-status).name
    hint = "; the system does that when main memory runs out" if name == "SIGKILL" else ""
    message = f"{parser.prog}: error: process {rank} was ended by {name}{hint}.\n"
    parser.exit(128 - status, message)


def warn_of_missing_ranks() -> None:
    """Print a warning if `accelerate launch --num_processes N` started a single process."""
    if "WORLD_SIZE" in os.environ:
        return
    parent_argv = psutil.Process().parent().cmdline()
    requested = dict(pairwise(parent_argv)).get("--num_processes", "1")
    by_accelerate = any(argument.endswith(("launch", "launch.py")) for argument in parent_argv)
    if by_accelerate and requested.isdigit() and int(requested) > 1:
        warning = (
            f"accelerate launch --num_processes {requested} has started one process, because there "
            f"are no GPUs. For {requested} processes on CPUs add --multi_gpu, or use `trl COMMAND "
            f"--num_processes {requested}`."
        )
        print(warning, file=sys.stderr)
