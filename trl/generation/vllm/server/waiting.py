"""Waiting that ends: looks at something until a deadline, and work in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

Answer = TypeVar("Answer")


def looks(seconds: float, pause: float, longest: float | None = None) -> Iterator[float]:
    """Yield the seconds that are left, with pauses between, until none are; at least once.

    Pauses double up to the `longest`; without one all are the same.
    """
    end, left = time.monotonic() + seconds, max(seconds, 0.0)
    while True:
        yield left
        left = end - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(pause, left))
        pause = min(2 * pause, longest or pause)


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
