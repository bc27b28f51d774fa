"""Calling tools: functions of the user, whose failures are told to the model."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema

from ...data.tool_template import tool_message
from ...text import did_you_mean
from ...timed_calls import Outcome, TimedCalls, TooSlow
from .calls import ToolCall

Functions = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class ToolResult:
    """What is told to the model about one of its calls."""

    name: str
    content: str
    failed: bool = False

    @classmethod
    def of(cls, name: str, outcome: Outcome) -> ToolResult:
        """What a call led to; values that JSON cannot hold are told as text."""
        if outcome.failure is None:
            outcome = Outcome.of(functools.partial(as_content, outcome.value))
        if outcome.failure is None:
            return cls(name, outcome.value)
        subject = "the call " if isinstance(outcome.failure, TooSlow) else ""
        return cls.failure(name, subject + outcome.words)

    @classmethod
    def failure(cls, name: str, words: str) -> ToolResult:
        """A call that could not be made, or that failed."""
        return cls(name, json.dumps({"error": words}, ensure_ascii=False), failed=True)

    def as_message(self) -> dict[str, Any]:
        """The message that carries the result."""
        return tool_message(self.name, self.content)


class ToolRunner:
    """The tools of a run: functions with type hints and a docstring in Google style.

    Plain functions are called one after the other, in a thread of their own so that a call takes
    `timeout` seconds at most; without a limit, in that of the trainer. Coroutine functions run all
    at once on one event loop. Each has a name of its own, and a schema; see `schema_of`.
    """

    def __init__(self, tools: Sequence[Callable[..., Any]], timeout: float | None):
        self.schemas = [schema_of(tool) for tool in tools]
        names = [schema["function"]["name"] for schema in self.schemas]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"tools: two are named {name!r}; rename one of them.")
        self.by_name = dict(zip(names, tools, strict=True))
        self._calls = TimedCalls(timeout)

    def __call__(
        self, calls: Sequence[ToolCall], own: Sequence[Functions | None] = ()
    ) -> list[ToolResult]:
        """Make all calls, and return their results in the same order. Never raises for a tool.

        A call may name the functions of its own that are given, or else those of the run.
        """
        results: dict[int, ToolResult] = {}
        waiting: dict[int, Callable[[], Any]] = {}
        pairs = zip(calls, own or [None] * len(calls), strict=True)
        for place, (call, given) in enumerate(pairs):
            tools = self.by_name if given is None else given
            problem = _problem(call, tools)
            if problem is not None:
                results[place] = ToolResult.failure(call.name, problem)
                continue
            bound = functools.partial(tools[call.name], **call.arguments)
            if inspect.iscoroutinefunction(tools[call.name]):
                waiting[place] = bound
            else:
                results[place] = ToolResult.of(call.name, self._calls.run(bound))
        outcomes = self._calls.run_at_once(list(waiting.values()))
        for place, outcome in zip(waiting, outcomes, strict=True):
            results[place] = ToolResult.of(calls[place].name, outcome)
        return [results[place] for place in range(len(calls))]


def _problem(call: ToolCall, tools: Functions) -> str | None:
    if call.problem is not None or call.name in tools:
        return call.problem
    hint = did_you_mean(call.name, tools, f" There are: {', '.join(tools)}." if tools else "")
    return f"there is no tool {call.name!r}.{hint}"


def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a tool, from its type hints and docstring; errors say what it lacks."""
    if not inspect.isfunction(tool) and not inspect.ismethod(tool):
        raise TypeError(f"tools: {tool!r:.80} is not a function or method.")
    try:
        return get_json_schema(tool)
    except Exception as error:  # of several kinds, all about the function's signature or docstring
        raise ValueError(
            f"tools: {tool.__name__!r} has no schema: {error} A tool needs a type hint for each "
            "argument, and a docstring with a summary and an 'Args:' section that describes each."
        ) from error


def as_content(value: Any) -> str:
    """Render what a tool returned as text: strings as they are, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
