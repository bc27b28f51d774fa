"""What this process is doing now, for a display. Imports the standard library alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Watcher = Callable[["Activity"], None]


@dataclass(frozen=True)
class Activity:
    """A phase of a step."""

    name: str  # such as "generation"
    rows: int = 0  # that this process works on; 0 where that is not known
    done: int = 0  # of them


_watchers: list[Watcher] = []
_current = Activity("")


def begin(name: str, rows: int = 0) -> None:
    """Say which phase begins, and with how many rows."""
    _tell(Activity(name, rows))


def finish(rows: int) -> None:
    """Say that this many more rows of the current phase are finished."""
    if rows:
        done = min(_current.done + rows, _current.rows)  # work may be repeated in smaller pieces
        _tell(Activity(_current.name, _current.rows, done))


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` with each activity that begins or goes on inside."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def _tell(activity: Activity) -> None:
    global _current
    _current = activity
    for watcher in list(_watchers):
        watcher(activity)
