"""How training commands end: what they print, and what becomes of their workers."""

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

# torch and transformers have no other type for weights that do not fit, or too little memory.
USER_ERRORS = (ValueError, TypeError, ImportError, OSError, RuntimeError)
MISTAKE = 2  # status of a worker that has told of a mistake in options or inputs
MAIN_RANK_FIRST = 30.0  # seconds in which the main process should meet a mistake that others met
ALONE = 2.0  # seconds after which a worker that goes on was not interrupted by the terminal
GRACE = 60.0  # seconds in which it should end when it is interrupted


def rank() -> int:
    """Number of this process among those that were launched together."""
    return int(os.environ.get("RANK", "0"))


@contextmanager
def one_line_errors(parser: OneLineParser, trainer: "Trainer | None" = None) -> Iterator[None]:
    """Turn what goes wrong inside into one line that says how to go on.

    Ctrl-C ends the process with status 130, an error with 2. The trace of an error is shown if the
    environment has TRL_DEBUG=1. If it came up while a `trainer` trained, a file keeps it, too.
    """
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next one ends this process at once
        if rank() == 0:
            print(f"{parser.prog}: interrupted {_place(trainer)}", file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        if os.environ.get("TRL_DEBUG") == "1":
            raise
        words = [as_command_line(describe(error), parser.all_names)]
        if trainer is not None:
            words += [f"This was {_place(trainer)}"] if trainer.state.global_step else []
            name = f"error-{rank()}.txt" if rank() else "error.txt"
            file = Path(str(trainer.args.output_dir), name)
            with suppress(OSError):
                file.write_text(without_surrogates(traceback.format_exc()), encoding="utf-8")
                words += [f"The trace is in {file}."]
        if rank() > 0:  # the main process tells of it, and its end is the end of the others
            time.sleep(MAIN_RANK_FIRST)
            words += [f"(process {rank()})"]
        text = without_surrogates(" ".join(filter(None, words)))
        print(f"{parser.prog}: error: {text}", file=sys.stderr, flush=True)
        raise SystemExit(MISTAKE) from None


def describe(error: BaseException) -> str:
    """An error in one line, with its kind if the words alone do not say what it is.

    A list in it keeps a line for each entry, and what follows the list begins a line.
    """
    text = _joined_lines(str(error))
    plain = isinstance(error, USER_ERRORS)
    return text if plain and text else f"{type(error).__name__}: {text}".rstrip(": ")


def _joined_lines(text: str) -> str:
    """Join the lines of a text, except for entries of a list, which begin with a hyphen."""
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
    """Spell options in a message of Python, such as `beta=0.1`, as a shell takes them."""
    known = "|".join(sorted(names, key=len, reverse=True))
    values = r"""('[^']*'|"[^"]*"|\{[^}]*\}|\([^)]*\)|\[[^\]]*\]|[-+\w/]+(?:\.\w+)*)"""

    def spelled(option: re.Match[str]) -> str:
        return f"--{option[1]} {_as_words(option[2])}"

    return re.sub(rf"(?<![\w.-])({known})={values}", spelled, text) if known else text


def _as_words(literal: str) -> str:
    """Write a Python literal as the words of an option; quotes of a text remain."""
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


def _place(trainer: "Trainer | None") -> str:
    """After how many steps training stopped, and the newest checkpoint."""
    if trainer is None:
        return "before training began."
    state, folder = trainer.state, str(trainer.args.output_dir)
    steps = f"after {state.global_step} of {state.max_steps} steps."
    found = checkpoints_in(folder)
    if not found:
        return f"{steps} There is no checkpoint in {folder}."
    resume = "; to continue from there, repeat the command with --resume_from_checkpoint true"
    resume = "" if trainer.args.save_only_model else resume
    return f"{steps} The newest checkpoint is {found[0]}{resume}."


def tell_success(trainer: "Trainer") -> None:
    """Print how many steps are done, and where the model is."""
    if trainer.is_world_process_zero():
        steps = f"{trainer.state.global_step} of {trainer.state.max_steps} steps done"
        print(f"{steps}; the model is in {trainer.args.output_dir}.", flush=True)


def check_output_dir(folder: str) -> None:
    """Refuse a folder, which need not exist yet, that cannot be written in or is in use."""
    place = Path(folder).absolute()
    try:
        while not os.path.lexists(place):
            place = place.parent
        if not place.is_dir():
            raise NotADirectoryError(None, "it is not a folder")
        with TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ValueError(
            f"--output_dir {folder}: nothing can be written in {place}: {error.strerror}."
        ) from None
    check_free(folder)


@contextmanager
def stopping_on_interrupt() -> Iterator[None]:
    """If this process is interrupted inside, wait until those that were started there have ended.

    A terminal interrupts them together with this process. Others may interrupt this one alone, so
    those still running are told, and killed when time is up. A second interrupt ends the wait.
    """
    before = set(psutil.Process().children())
    try:
        yield
    except KeyboardInterrupt:
        workers = list(set(psutil.Process().children()) - before)
        with suppress(KeyboardInterrupt):
            _, running = psutil.wait_procs(workers, timeout=ALONE)
            _send(signal.SIGINT, running)
            psutil.wait_procs(running, timeout=GRACE)
        _send(signal.SIGKILL, workers)
        raise


def _send(number: signal.Signals, workers: Iterable[psutil.Process]) -> None:
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            worker.send_signal(number)


def exit_like(parser: ArgumentParser, rank: int, status: int) -> NoReturn:
    """End with the status of a worker, as shells write it; some mean that it has said why."""
    if status in (MISTAKE, INTERRUPTED):
        parser.exit(status)
    if status >= 0:
        parser.exit(status, f"{parser.prog}: error: process {rank} ended with status {status}.\n")
    name = signal.Signals(-status).name
    hint = "; the system does that when main memory runs out" if name == "SIGKILL" else ""
    message = f"{parser.prog}: error: process {rank} was ended by {name}{hint}.\n"
    parser.exit(128 - status, message)


def warn_of_missing_ranks() -> None:
    """Say that `accelerate launch --num_processes N` started one process, for want of GPUs."""
    words = psutil.Process().parent().cmdline() if "WORLD_SIZE" not in os.environ else []
    wanted = dict(pairwise(words)).get("--num_processes", "1")
    launched = any(word.endswith(("launch", "launch.py")) for word in words)
    if launched and wanted.isdigit() and int(wanted) > 1:
        text = (
            f"accelerate launch --num_processes {wanted} has started one process, because there "
            f"are no GPUs. For {wanted} processes on CPUs add --multi_gpu, or use `trl COMMAND "
            f"--num_processes {wanted}`."
        )
        print(text, file=sys.stderr)
