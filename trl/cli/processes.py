"""Processes that a command has started: how they stop, and how many there are."""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import NoReturn

import psutil

from .main import INTERRUPTED

MISTAKE = 2  # status of a worker that has told of a mistake in options or inputs

ALONE = 2.0  # seconds after which a process that goes on was not told by the terminal
GRACE = 60.0  # seconds in which it should end


@contextmanager
def stopping_on_interrupt() -> Iterator[None]:
    """If this process is interrupted inside, wait until those that were started there have ended.

    A terminal interrupts them together with this process. Others may interrupt this one alone, so
    those that go on are told, and killed when patience is over. A second interrupt ends the wait.
    """
    before = set(psutil.Process().children())
    try:
        yield
    except KeyboardInterrupt:
        _stop(list(set(psutil.Process().children()) - before))
        raise


def _stop(workers: list[psutil.Process]) -> None:
    with suppress(KeyboardInterrupt):
        _, running = psutil.wait_procs(workers, timeout=ALONE)
        for worker in running:
            _send(worker, signal.SIGINT)
        psutil.wait_procs(running, timeout=GRACE)
    for worker in workers:
        _send(worker, signal.SIGKILL)


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


def _send(worker: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        worker.send_signal(number)


def warn_of_missing_ranks() -> None:
    """Say that `accelerate launch --num_processes N` started one process, for want of GPUs."""
    words = psutil.Process().parent().cmdline() if "WORLD_SIZE" not in os.environ else []
    wanted = dict(pairwise(words)).get("--num_processes", "1")
    launched = any(word.endswith(("launch", "launch.py")) for word in words)
    if launched and wanted.isdigit() and int(wanted) > 1:
        print(
            f"accelerate launch --num_processes {wanted} has started one process, because there "
            f"are no GPUs. For {wanted} processes on CPUs add --multi_gpu, or use `trl COMMAND "
            f"--num_processes {wanted}`.",
            file=sys.stderr,
        )
