"""Call users' functions with a time limit, and return their failures as values.

Calls with a time limit run in another thread. That thread takes over the per-thread settings of
torch from the calling thread: the CUDA device (a new thread would use device 0 on every rank), the
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
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch

# Exceptions that are returned as failures, so that all ranks learn of them before a process ends.
FAILURES = (Exception, SystemExit, asyncio.CancelledError)

IMMUTABLE_TYPES = frozenset({str, int, float, bool, type(None)})
CallQueue = queue.SimpleQueue[tuple[Callable[[], Any], Future["Outcome"]]]


def copy_containers(value: Any) -> Any:
    """Copy nested lists, tuples and dictionaries, so that a user's function may modify them.

    Objects of other types, such as environments, are shared with the original.
    """
    container = type(value)
    if container is dict:
        return {key: copy_containers(entry) for key, entry in value.items()}
    if container is list or container is tuple:
        # Lists of numbers, such as a million token ids, are copied at once.
        is_flat = IMMUTABLE_TYPES.issuperset(map(type, value))
        return container(value if is_flat else map(copy_containers, value))
    return value


class CallTimeout(Exception):
    """A call exceeded its time limit.

    Not a `TimeoutError`, which a user's function may raise itself.
    """

    def __init__(self, seconds: float, blocks: bool = False):
        self.blocks = blocks
        message = f"took longer than {seconds:g} seconds"
        if blocks:
            message += " and blocks the event loop; it must await, or be a plain function"
        super().__init__(message)


@dataclass(frozen=True)
class Outcome:
    """The result of a call: the returned value, or the exception that it raised."""

    value: Any = None
    failure: BaseException | None = None

    @classmethod
    def of(cls, function: Callable[[], Any]) -> Self:
        """Call a function and catch `FAILURES`; Ctrl-C still ends the program."""
        try:
            return cls(function())
        except FAILURES as error:
            return cls(failure=error)

    @property
    def error_text(self) -> str:
        """Describe the failure, such as "took longer than 5 seconds" or "KeyError: 'x'"."""
        if isinstance(self.failure, CallTimeout):
            return str(self.failure)
        return f"{type(self.failure).__name__}: {self.failure}"


@dataclass(frozen=True)
class TorchSettings:
    """The settings that torch keeps for each thread."""

    records_gradients: bool
    default_device: "torch.device"
    cuda_device: int | None  # None if CUDA is not in use

    @classmethod
    def of_this_thread(cls) -> Self | None:
        """Return the settings of the calling thread; None if torch is not imported."""
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        uses_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            records_gradients=torch.is_grad_enabled(),
            default_device=torch.get_default_device(),
            cuda_device=torch.cuda.current_device() if uses_cuda else None,
        )

    def apply(self) -> None:
        """Use these settings in the calling thread."""
        torch = sys.modules["torch"]
        torch.set_grad_enabled(self.records_gradients)
        if torch.get_default_device() != self.default_device:
            torch.set_default_device(self.default_device)
        if self.cuda_device is not None:
            torch.cuda.set_device(self.cuda_device)


class TimedCalls:
    """Calls plain functions one after the other, and coroutine functions concurrently.

    Each call may take `seconds`; None means without a limit.
    """

    def __init__(self, seconds: float | None):
        self._seconds = seconds
        self._worker: CallQueue | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, functions: Sequence[Callable[[], Any]]) -> list[Outcome]:
        """Call functions, coroutine functions last, and return their outcomes in order."""
        outcomes: dict[int, Outcome] = {}
        async_indices = []
        for index, function in enumerate(functions):
            if is_async(function):
                async_indices.append(index)
            else:
                outcomes[index] = self._run(function)
        if async_indices:
            async_outcomes = self._run_concurrently([functions[i] for i in async_indices])
            outcomes |= zip(async_indices, async_outcomes, strict=True)
        return [outcomes[index] for index in range(len(functions))]

    def _run(self, function: Callable[[], Any]) -> Outcome:
        if self._seconds is None:  # no thread is needed without a limit
            return Outcome.of(function)
        if self._worker is None:
            self._worker = _start_worker()
        future: Future[Outcome] = Future()
        settings = TorchSettings.of_this_thread()

        def call_with_settings() -> Any:
            if settings is not None:
                settings.apply()
            return function()

        self._worker.put((call_with_settings, future))
        if wait([future], self._seconds).not_done:
            self._worker = None  # a thread cannot be stopped, so the next call starts a new one
            return Outcome(failure=CallTimeout(self._seconds))
        return future.result()

    def _run_concurrently(self, functions: Sequence[Callable[[], Awaitable[Any]]]) -> list[Outcome]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        loop = self._loop
        seconds = self._seconds
        settings = TorchSettings.of_this_thread()
        if settings is not None:
            loop.call_soon_threadsafe(settings.apply)
        futures: list[Future[Outcome]] = [Future() for _ in functions]
        for function, future in zip(functions, futures, strict=True):
            asyncio.run_coroutine_threadsafe(_limited(function, seconds, future), loop)
        # The event loop cancels calls that take too long, unless one of them blocks the loop.
        while wait(futures, seconds).not_done:
            probe = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
            if wait([probe], seconds).not_done:
                self._loop = None
                break
        blocked = Outcome(failure=CallTimeout(seconds or 0.0, blocks=True))
        return [future.result() if future.done() else blocked for future in futures]


def is_async(function: object) -> bool:
    """Return whether calling it gives a coroutine: an async function, or one in `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    call_method = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call_method)


async def _limited(
    function: Callable[[], Awaitable[Any]], seconds: float | None, future: Future[Outcome]
) -> None:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            outcome = Outcome(await function())
    except FAILURES as error:  # including SystemExit, which would end the event loop
        outcome = Outcome(failure=CallTimeout(seconds or 0.0) if limit.expired() else error)
    future.set_result(outcome)  # set here, because the next coroutine may block the loop


def _start_worker() -> CallQueue:
    """Start a daemon thread, and return the queue of the calls that it makes in order."""
    calls: CallQueue = queue.SimpleQueue()

    def run() -> None:
        while True:
            function, future = calls.get()
            try:
                future.set_result(Outcome.of(function))
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return calls
