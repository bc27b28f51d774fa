"""Calling tools: functions of the user, whose failures are told to the model."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema

from ...data.tool_template import tool_message
from ...text import did_you_mean
from .calls import ToolCall

# What a tool may raise without ending the process.
FAILURES = (Exception, SystemExit, asyncio.CancelledError)


@dataclass(frozen=True)
class ToolResult:
    """What is told to the model about one of its calls."""

    name: str
    content: str
    failed: bool = False

    @classmethod
    def failure(cls, name: str, words: str) -> ToolResult:
        """A call that could not be made, or that failed."""
        return cls(name, json.dumps({"error": words}, ensure_ascii=False), failed=True)

    def as_message(self) -> dict[str, Any]:
        """The message that carries the result."""
        return tool_message(self.name, self.content)


class ToolRunner:
    """The tools of a run.

    Plain functions are called one after the other, in a thread of their own so that the time they
    take can be limited; coroutine functions run all at once on one event loop.

    Args:
        tools: functions with type hints and a docstring in Google style.
        timeout (`float`, *optional*): seconds a call may take. None: no limit, and plain functions
            are called in the thread of the trainer.

    Raises:
        TypeError: if a tool is no function.
        ValueError: if a tool has no schema, or two have the same name.
    """

    def __init__(self, tools: Sequence[Callable[..., Any]], timeout: float | None):
        self.schemas = [schema_of(tool) for tool in tools]
        names = [schema["function"]["name"] for schema in self.schemas]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"tools: two have the name {name!r}; rename one of them.")
        self._tools = dict(zip(names, tools, strict=True))
        self._timeout = timeout
        self._worker: _Worker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Make all calls, and return their results in the same order. Never raises for a tool."""
        results: list[ToolResult | None] = [self._refusal(call) for call in calls]
        waiting = []
        for place, call in enumerate(calls):
            if results[place] is None and inspect.iscoroutinefunction(self._tools[call.name]):
                waiting.append(place)
            elif results[place] is None:
                results[place] = self._outcome(call, functools.partial(self._call_plain, call))
        if waiting:
            answers = self._call_at_once([calls[place] for place in waiting])
            for place, answer in zip(waiting, answers, strict=True):
                results[place] = answer
        return [result for result in results if result is not None]

    def _refusal(self, call: ToolCall) -> ToolResult | None:
        if call.problem is not None:
            return ToolResult.failure(call.name, call.problem)
        if call.name not in self._tools:
            hint = did_you_mean(call.name, self._tools, f" There are: {', '.join(self._tools)}.")
            return ToolResult.failure(call.name, f"there is no tool {call.name!r}.{hint}")
        return None

    def _outcome(self, call: ToolCall, run: Callable[[], Any]) -> ToolResult:
        try:
            return ToolResult(call.name, as_content(run()))
        except FAILURES as error:
            return ToolResult.failure(call.name, self._words(error))

    def _words(self, error: BaseException) -> str:
        if isinstance(error, _TooSlow):
            return f"the call took longer than {self._timeout:g} seconds"
        return f"{type(error).__name__}: {error}"

    def _call_plain(self, call: ToolCall) -> Any:
        function = functools.partial(self._tools[call.name], **call.arguments)
        if self._timeout is None:
            return function()
        if self._worker is None:
            self._worker = _Worker()
        future = self._worker.submit(function)
        if not wait_for([future], self._timeout).done:
            self._worker = None  # a thread cannot be stopped, only left behind
            raise _TooSlow
        return future.result()

    def _call_at_once(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        futures = [asyncio.run_coroutine_threadsafe(self._limited(c), self._loop) for c in calls]
        # A coroutine that blocks the loop keeps the limits from being noticed inside it.
        wait_for(futures, None if self._timeout is None else self._timeout + 1)
        if not all(future.done() for future in futures):
            self._loop = None
        return [
            self._outcome(call, functools.partial(_finished, future))
            for call, future in zip(calls, futures, strict=True)
        ]

    async def _limited(self, call: ToolCall) -> Any:
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                return await self._tools[call.name](**call.arguments)
        except TimeoutError:
            if limit.expired():
                raise _TooSlow from None
            raise


class _TooSlow(Exception):
    """A call went beyond the limit; tools may raise `TimeoutError` of their own."""


def _finished(future: Future[Any]) -> Any:
    if not future.done():
        future.cancel()
        raise _TooSlow
    return future.result()


class _Worker:
    """One thread that calls functions in order, and does not keep the process from ending."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Queue a call."""
        future: Future[Any] = Future()
        self._work.put((function, future))
        return future

    def _run(self) -> None:
        while True:
            function, future = self._work.get()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)


def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a tool, from its type hints and docstring.

    Raises:
        TypeError: if it is no function.
        ValueError: naming the tool and what it lacks.
    """
    if not inspect.isfunction(tool) and not inspect.ismethod(tool):
        raise TypeError(f"tools: {tool!r:.80} is no function or method.")
    try:
        return get_json_schema(tool)
    except Exception as error:  # of several kinds, all about the function's signature or docstring
        raise ValueError(
            f"tools: {tool.__name__!r} has no schema: {error} A tool needs a type hint for each "
            "argument, and a docstring with a summary and an 'Args:' section that describes each."
        ) from error


def as_content(value: Any) -> str:
    """Render what a tool returned as text: strings as they are, other values as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
