"""Waiting with an end: points in time, and work that nobody waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Answer = TypeVar("Answer")


class Deadline:
    """A point in time.

    Args:
        seconds (`float`): from now.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until then; 0 once it has passed."""
        return max(0.0, self._end - time.monotonic())

    @property
    def has_passed(self) -> bool:
        """Whether it is over."""
        return not self.left


def in_background(work: Callable[[], Answer]) -> Future[Answer]:
    """Do something in a thread that the end of the process does not wait for."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
