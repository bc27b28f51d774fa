"""The lock of an output folder: one run at a time writes into it.

The first rank creates a file when training begins, touches it while training, and removes it at the
end. Locks of runs that were killed are recognized and replaced.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from transformers.utils import logging

from ...distributed import Ranks

if TYPE_CHECKING:
    from transformers import TrainingArguments

fcntl: Any
try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

logger = logging.get_logger(__name__)

LOCK = "_run.lock"  # names with an underscore are never uploaded to the hub
REFRESH = 10.0  # seconds between two touches
ABANDONED = 120.0  # seconds without a touch after which a run elsewhere counts as dead
WRITING = 2.0  # seconds in which a process writes the lock it has created
CLOCK_TOLERANCE = 2.0  # seconds by which two readings of a process's start may differ


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock."""

    host: str
    process_id: int
    process_start: float  # seconds since 1970: process ids are used again
    pid_namespace: str  # of a container, where other processes have the same ids
    since: float  # seconds since 1970: when training began

    @classmethod
    def current(cls) -> "Owner":
        """This process, from now on."""
        process = psutil.Process()
        return cls(
            host=socket.gethostname(),
            process_id=process.pid,
            process_start=process.create_time(),
            pid_namespace=_pid_namespace(),
            since=time.time(),
        )

    @property
    def is_visible(self) -> bool:
        """Whether this process can look the owner up by its id."""
        return self.host == socket.gethostname() and self.pid_namespace == _pid_namespace()

    def is_alive(self) -> bool:
        """Whether a visible owner still runs."""
        try:
            process = psutil.Process(self.process_id)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return abs(process.create_time() - self.process_start) < CLOCK_TOLERANCE
        except psutil.NoSuchProcess:
            return False


class FolderInUseError(OSError):
    """Another run trains in the output folder."""


class RunLock:
    """Holds the lock of a trainer's output folder inside a `with`, which may be entered again.

    Every rank enters it; the first one holds the lock, and all raise if it cannot.

    Args:
        args: a training configuration, whose `output_dir` is read when the lock is taken.
        ranks: the ranks of the run.
    """

    def __init__(self, args: "TrainingArguments", ranks: Ranks):
        self._args = args
        self._ranks = ranks
        self._depth = 0
        self._path: Path | None = None
        self._owner: Owner | None = None
        self._ended = threading.Event()

    def __enter__(self) -> "RunLock":
        if self._depth == 0:
            with self._ranks.fail_together("locking output_dir"):
                if self._ranks.rank == 0:
                    self._acquire(Path(self._args.output_dir))
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._path is not None:
            self._release(self._path)

    def _acquire(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder.absolute() / LOCK  # scripts may change the working directory
        owner = Owner.current()
        while not _create(path, owner):
            with _folder_guarded(folder):
                text = check_free(folder)
                if text is not None:
                    _remove(path, text)
        self._path = path
        self._owner = owner
        self._ended = threading.Event()
        threading.Thread(target=self._keep_fresh, args=(path, self._ended), daemon=True).start()

    def _release(self, path: Path) -> None:
        self._ended.set()
        if read_owner(path) == self._owner:
            path.unlink(missing_ok=True)
        self._path = None

    def _keep_fresh(self, path: Path, ended: threading.Event) -> None:
        while not ended.wait(REFRESH):
            if read_owner(path) != self._owner:
                if not ended.is_set():
                    logger.warning(f"{path} was removed or replaced while this run trains there.")
                return
            with suppress(OSError):
                os.utime(path)


def check_free(folder: str | Path) -> str | None:
    """Refuse a folder in which another run trains; return the lock of a dead run, None if none.

    A run on another machine, or in another container, is watched for up to `ABANDONED` seconds.

    Raises:
        FolderInUseError: another run trains in this folder.
    """
    path = Path(folder) / LOCK
    lock = _read_written(path)
    if lock is None:
        return None
    text, touched = lock
    owner = _parsed(text)
    if owner is not None and owner.is_visible:
        if owner.is_alive() and owner.process_id != os.getpid():
            raise FolderInUseError(_describe(path, owner))
    elif not _stays_untouched(path, touched):
        raise FolderInUseError(_describe(path, owner))
    return text


def read_owner(path: Path) -> Owner | None:
    """Who holds a lock; None if it is gone or damaged."""
    lock = _read(path)
    return None if lock is None else _parsed(lock[0])


def _create(path: Path, owner: Owner) -> bool:
    """Create the lock, if no process has been quicker."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(asdict(owner), file)
    return True


def _remove(path: Path, text: str) -> None:
    """Remove a lock, unless another process has already replaced it by its own."""
    aside = path.with_name(f"{LOCK}.{socket.gethostname()}.{os.getpid()}")
    with suppress(FileNotFoundError):  # another process has removed it
        path.rename(aside)
        if aside.read_text(encoding="utf-8") == text:
            aside.unlink()
        else:
            aside.rename(path)


def _read(path: Path) -> tuple[str, float] | None:
    """Content of the lock and the time of its last touch; None if there is none."""
    with suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as file:
        # Network file systems ask the server for a file that is opened, not for one that is named.
        return file.read(), os.fstat(file.fileno()).st_mtime
    return None


def _read_written(path: Path) -> tuple[str, float] | None:
    """As `_read`; a lock that has just been created gets a moment to be written."""
    deadline = time.monotonic() + WRITING
    while (lock := _read(path)) is not None and not lock[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    return lock


def _parsed(text: str) -> Owner | None:
    with suppress(ValueError, TypeError):
        return Owner(**json.loads(text))
    return None


def _stays_untouched(path: Path, touched: float) -> bool:
    """Watch a lock until it is touched, or long enough."""
    if _file_time(path.parent) - touched < ABANDONED:
        logger.warning(
            f"{path} is from a run on another machine or in another container. Watching for up to "
            f"{ABANDONED:.0f} seconds whether that run is alive."
        )
    while _file_time(path.parent) - touched < ABANDONED:
        time.sleep(min(1.0, REFRESH / 4))
        lock = _read(path)
        if lock is None:
            return True
        if lock[1] != touched:
            return False
    return True


def _file_time(folder: Path) -> float:
    """The time by the clock of the disk, which may be on another machine."""
    probe = folder / f"{LOCK}.{socket.gethostname()}.{os.getpid()}.time"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


@contextmanager
def _folder_guarded(folder: Path) -> Iterator[None]:
    """Let one process of this machine at a time look at a lock and replace it, where possible."""
    handle = os.open(folder, os.O_RDONLY) if fcntl is not None else None
    try:
        if handle is not None:
            with suppress(OSError):  # of network file systems that have no such locks
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _describe(path: Path, owner: Owner | None) -> str:
    folder = str(path.parent)
    if owner is None:
        return (
            f"output_dir={folder!r} is in use: {path} belongs to a run of another program. Choose "
            "another output_dir. If no run trains there, remove that file."
        )
    since = datetime.fromtimestamp(owner.since).astimezone()
    text = (
        f"output_dir={folder!r} is in use: process {owner.process_id} on {owner.host} has been "
        f"training there since {since:%Y-%m-%d %H:%M:%S %Z}. Choose another output_dir, or end "
        "that run first."
    )
    return text if owner.is_visible else f"{text} If it has ended, remove {path}."


def _pid_namespace() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""
