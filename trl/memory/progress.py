"""What this process is working on now, for progress displays. Standard library only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Watcher = Callable[["Activity"], None]


@dataclass(frozen=True)
class Activity:
    """A phase of a training step, and how far it is."""

    name: str  # such as "generation"
    rows: int = 0  # rows this process works on; 0 if unknown
    done: int = 0  # rows finished so far


_watchers: list[Watcher] = []
_current = Activity("")


def begin(name: str, rows: int = 0) -> None:
    """Start a phase of `rows` rows."""
    _set_activity(Activity(name, rows))


def finish(rows: int) -> None:
    """Count `rows` more rows of the current phase as finished."""
    if rows:
        # Work that ran out of memory is repeated in smaller chunks, so rows may be counted twice.
        done = min(_current.done + rows, _current.rows)
        _set_activity(Activity(_current.name, _current.rows, done))


@contextmanager
def report_progress_to(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` with each activity that starts or advances inside the block."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def _set_activity(activity: Activity) -> None:
    global _current
    _current = activity
    for watcher in list(_watchers):
        watcher(activity)
