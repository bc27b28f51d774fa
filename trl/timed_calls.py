"""Calling functions that users wrote: limited in time, with failures as values.

Calls with a limit run in threads of their own. These get the settings that torch has for the
calling thread, which a new one would lack: the CUDA device, which is 0 at first on every rank, the
default device, and whether gradients are recorded.
"""

import asyncio
import functools
import inspect
import queue
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Self

# What a function may raise without ending the process before the other ranks know of it.
FAILURES = (Exception, SystemExit, asyncio.CancelledError)

UNCHANGEABLE = frozenset({str, int, float, bool, type(None)})
Work = queue.SimpleQueue[tuple[Callable[[], Any], Future["Outcome"]]]


def copied(value: Any) -> Any:
    """Copy nested lists, tuples and dictionaries: a function may then change what it is given.

    Objects of other types, such as environments, are shared.
    """
    kind = type(value)
    if kind is dict:
        return {key: copied(entry) for key, entry in value.items()}
    if kind is list or kind is tuple:
        is_flat = UNCHANGEABLE.issuperset(map(type, value))  # lists of a million token ids
        return kind(value if is_flat else map(copied, value))
    return value


class TooSlow(Exception):
    """A call went beyond its limit. Not a `TimeoutError`, which functions may raise themselves."""

    def __init__(self, seconds: float, blocks: bool = False):
        self.blocks = blocks
        why = " and blocks the event loop; it must await, or be a plain function" if blocks else ""
        super().__init__(f"took longer than {seconds:g} seconds{why}")


@dataclass(frozen=True)
class Outcome:
    """What a call returned, or why it did not."""

    value: Any = None
    failure: BaseException | None = None

    @classmethod
    def of(cls, function: Callable[[], Any]) -> Self:
        """Call a function; only what ends the program on purpose, such as Ctrl-C, is raised."""
        try:
            return cls(function())
        except FAILURES as error:
            return cls(failure=error)

    @property
    def words(self) -> str:
        """Say what went wrong: `took longer than 5 seconds`, or `KeyError: 'x'`."""
        if isinstance(self.failure, TooSlow):
            return str(self.failure)
        return f"{type(self.failure).__name__}: {self.failure}"


@dataclass(frozen=True)
class TorchSettings:
    """Settings of torch that each thread has for itself."""

    records_gradients: bool
    default_device: Any  # torch.device
    cuda_device: int | None  # None: CUDA is not in use

    @classmethod
    def of_this_thread(cls) -> Self | None:
        """Those of the calling thread; None if torch was not imported."""
        if (torch := sys.modules.get("torch")) is None:
            return None
        uses_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            records_gradients=torch.is_grad_enabled(),
            default_device=torch.get_default_device(),
            cuda_device=torch.cuda.current_device() if uses_cuda else None,
        )

    def apply(self) -> None:
        """Take them over in the calling thread."""
        torch = sys.modules["torch"]
        torch.set_grad_enabled(self.records_gradients)
        if torch.get_default_device() != self.default_device:
            torch.set_default_device(self.default_device)
        if self.cuda_device is not None:
            torch.cuda.set_device(self.cuda_device)


class TimedCalls:
    """Calls functions one after the other, coroutine functions all at once, for `seconds` each."""

    def __init__(self, seconds: float | None):
        self._seconds = seconds
        self._worker: Work | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, functions: Sequence[Callable[[], Any]]) -> list[Outcome]:
        """Call functions, coroutine functions last, and return their outcomes in order."""
        outcomes = {i: self._run(call) for i, call in enumerate(functions) if not is_async(call)}
        waiting = [i for i in range(len(functions)) if i not in outcomes]
        found = self._run_at_once([functions[i] for i in waiting]) if waiting else []
        outcomes |= zip(waiting, found, strict=True)
        return [outcomes[i] for i in range(len(functions))]

    def _run(self, function: Callable[[], Any]) -> Outcome:
        if self._seconds is None:  # in the calling thread, where there is no limit
            return Outcome.of(function)
        self._worker = self._worker or _worker()
        future: Future[Outcome] = Future()
        settings = TorchSettings.of_this_thread()

        def work() -> Any:
            if settings is not None:
                settings.apply()
            return function()

        self._worker.put((work, future))
        if wait([future], self._seconds).not_done:
            self._worker = None  # a thread cannot be stopped, only left behind
            return Outcome(failure=TooSlow(self._seconds))
        return future.result()

    def _run_at_once(self, functions: Sequence[Callable[[], Awaitable[Any]]]) -> list[Outcome]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        loop, seconds = self._loop, self._seconds
        if (settings := TorchSettings.of_this_thread()) is not None:
            loop.call_soon_threadsafe(settings.apply)
        futures: list[Future[Outcome]] = [Future() for _ in functions]
        for function, future in zip(functions, futures, strict=True):
            asyncio.run_coroutine_threadsafe(_limited(function, seconds, future), loop)
        # The loop ends calls that take too long, unless one of them keeps it from doing so.
        while wait(futures, seconds).not_done:
            answer = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
            if wait([answer], seconds).not_done:
                self._loop = None
                break
        late = Outcome(failure=TooSlow(seconds or 0.0, blocks=True))
        return [future.result() if future.done() else late for future in futures]


def is_async(function: Any) -> bool:
    """Whether it is a coroutine function, or an object whose call is one."""
    while isinstance(function, functools.partial):
        function = function.func
    called = getattr(function, "__call__", None)  # noqa: B004
    return any(map(inspect.iscoroutinefunction, (function, called)))


async def _limited(
    function: Callable[[], Awaitable[Any]], seconds: float | None, future: Future[Outcome]
) -> None:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            outcome = Outcome(await function())
    except FAILURES as error:  # SystemExit would end the loop
        outcome = Outcome(failure=TooSlow(seconds or 0.0) if limit.expired() else error)
    future.set_result(outcome)  # now, for the next coroutine may block the loop


def _worker() -> Work:
    """Calls for one thread to make in order, which does not keep the process from ending."""
    work: Work = queue.SimpleQueue()

    def run() -> None:
        while True:
            function, future = work.get()
            try:
                future.set_result(Outcome.of(function))
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return work
