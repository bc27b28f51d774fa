"""Tool calls: finding them in what a model wrote, making them, and telling it about failures."""

import contextlib
import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from ...data.templates import read_response, reads_responses
from ...json_files import json_text, without_surrogates
from ...suggestions import did_you_mean
from ...timed_calls import CallTimeout, Outcome, TimedCalls, copy_containers
from .templates import ARGUMENT, FUNCTION, NAME, PARAMETER, UNKNOWN, rendered_call

Functions = Mapping[str, Callable[..., Any]]
TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
NESTED = re.compile(rf"\s*{FUNCTION}(?P<body>.*?)</function>\s*\Z", re.DOTALL)
# A turn that is nothing but one JSON object with a name.
BARE = re.compile(r'\A\s*(?:<\|python_tag\|>)?\s*(\{(?=.*"name").*\})\s*\Z', re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call the model asked for; `problem` says why it cannot be made, if it cannot."""

    name: str
    arguments: dict[str, Any]
    problem: str | None = None

    @classmethod
    def of(cls, value: Any) -> Self:
        """Read a call from `{"name": ..., "arguments": {...}}`, or a function that holds it."""
        value = value.get("function", value) if isinstance(value, dict) else value
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return cls.malformed("it must be an object with a name and arguments", value)
        arguments = value.get("arguments", value.get("parameters")) or {}
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):  # the next check says what is wrong
                arguments = json.loads(arguments)
        arguments = without_surrogates(arguments)
        if not isinstance(arguments, dict):
            return cls.malformed("its arguments must be an object", value)
        return cls(without_surrogates(value["name"]), arguments)

    @classmethod
    def malformed(cls, reason: str, value: Any) -> Self:
        """A call that cannot be understood."""
        return cls("", {}, f"malformed tool call ({reason}): {value!r:.200}")


Turn = tuple[dict[str, Any], list[ToolCall]]  # the message, and its calls


def read_calls(
    written: re.Pattern[str], text: str, schemas: Sequence[dict[str, Any]]
) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls, as JSON or as nested `<function=...>` tags."""
    calls = [_read_body(match[1], schemas) for match in written.finditer(text)]
    return (written.sub("", text).strip() if calls else text), calls


def _read_body(body: str, schemas: Sequence[dict[str, Any]]) -> ToolCall:
    match = NESTED.match(body)
    if match is None:
        try:
            return ToolCall.of(json.loads(body))
        except (ValueError, RecursionError) as error:
            return ToolCall.malformed(f"it is not JSON: {error}", body.strip())
    name = match["name"].strip()
    functions = {schema["function"]["name"]: schema["function"] for schema in schemas}
    known = functions[name]["parameters"]["properties"] if name in functions else {}
    arguments: dict[str, Any] = {}
    for key, value in re.findall(PARAMETER, match["body"], re.DOTALL):
        arguments[key.strip()] = value
        if known.get(key.strip(), {}).get("type") != "string":  # those stay as they are written
            with contextlib.suppress(ValueError):
                arguments[key.strip()] = without_surrogates(json.loads(value))
    return ToolCall(name, arguments)


class ToolCallParser:
    """Reads turns of the model.

    A tokenizer with a `response_template` is asked to parse; otherwise calls are read in the format
    in which the chat template, called with `template_kwargs`, writes them; ValueError if unknown.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        schemas: Sequence[dict[str, Any]],
        template_kwargs: dict[str, Any] | None = None,
    ):
        self._tokenizer = tokenizer
        self._schemas = list(schemas)
        self._special = [token for token in tokenizer.all_special_tokens if token]
        self._written: re.Pattern[str] | None = None  # how calls are
        if reads_responses(tokenizer):
            return
        written = rendered_call(tokenizer, **(template_kwargs or {}))
        text = self._plain(written)
        for pattern in (TAGGED, BARE):
            if ToolCall(NAME, {"word": ARGUMENT}) in read_calls(pattern, text, schemas)[1]:
                self._written = pattern
                return
        raise ValueError(f"tools: the {UNKNOWN.format(written)}")

    def __call__(self, prompt: Sequence[int], ids: Sequence[int]) -> Turn:
        """The assistant message of a turn, and its calls in order.

        `prompt` are token ids before the turn; `ids` those of the turn, less the one that ended it.
        """
        text = self._tokenizer.decode(list(ids))
        if self._written is None:
            try:
                message = read_response(self._tokenizer, prompt, ids, self._schemas)
                calls = [ToolCall.of(value) for value in message.pop("tool_calls", None) or []]
                message = without_surrogates(message)
            except Exception as error:  # whatever its parser raises at text it does not understand
                message = {"role": "assistant", "content": self._plain(text)}
                calls = [ToolCall.malformed(str(error), text)]
        else:
            text, calls = read_calls(self._written, text, self._schemas)
            plain = self._tokenizer.decode(list(ids), skip_special_tokens=True)
            message = {"role": "assistant", "content": self._plain(text) if calls else plain}
        if calls:
            functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
            message["tool_calls"] = [{"type": "function", "function": each} for each in functions]
        return message, calls

    def _plain(self, text: str) -> str:
        for token in self._special:
            text = text.replace(token, "")
        return text


@dataclass(frozen=True)
class ToolResult:
    """What the model is told about one of its calls."""

    name: str
    content: str
    failed: bool = False

    @classmethod
    def of(cls, name: str, outcome: Outcome) -> Self:
        """What a call led to; values that JSON cannot hold are given as text."""
        if outcome.failure is None and not isinstance(outcome.value, str):
            outcome = Outcome.of(functools.partial(json_text, outcome.value))
        if outcome.failure is None:
            return cls(name, without_surrogates(outcome.value))
        subject = "the call " if isinstance(outcome.failure, CallTimeout) else ""
        return cls.failure(name, subject + outcome.error_text)

    @classmethod
    def failure(cls, name: str, words: str) -> Self:
        """A call that could not be made, or that failed."""
        return cls(name, json_text({"error": words}), failed=True)


class ToolRunner:
    """The tools of a run: functions with type hints and a docstring in Google style.

    Plain functions are called one after the other, in a thread of their own so that a call takes
    `timeout` seconds at most; without a limit, in that of the trainer. Coroutine functions run all
    at once on one event loop. Each has a name of its own, and a schema; see `tool_schema`.
    """

    def __init__(self, tools: Sequence[Callable[..., Any]], timeout: float | None):
        self.schemas = [tool_schema(tool) for tool in tools]
        names = [schema["function"]["name"] for schema in self.schemas]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"tools: two tools are named {name!r}; rename one.")
        self.by_name = dict(zip(names, tools, strict=True))
        self._calls = TimedCalls(timeout)

    def __call__(
        self, calls: Sequence[ToolCall], functions: Sequence[Functions] | None = None
    ) -> list[ToolResult]:
        """Make all calls, and return their results in the same order. Never raises for a tool.

        `functions` are those that each call may name, by default all of the run.
        """
        results: dict[int, ToolResult] = {}
        made: dict[int, Callable[[], Any]] = {}
        pairs = zip(calls, functions or [self.by_name] * len(calls), strict=True)
        for place, (call, tools) in enumerate(pairs):
            problem = call.problem
            if problem is None and call.name not in tools:
                every = f" There are: {', '.join(tools)}." if tools else ""
                hint = did_you_mean(call.name, tools, every)
                problem = f"there is no tool {call.name!r}.{hint}"
            if problem is None:
                made[place] = functools.partial(tools[call.name], **copy_containers(call.arguments))
            else:
                results[place] = ToolResult.failure(call.name, problem)
        for place, outcome in zip(made, self._calls([*made.values()]), strict=True):
            results[place] = ToolResult.of(calls[place].name, outcome)
        return [results[place] for place in range(len(calls))]


def tool_schema(tool: Callable[..., Any]) -> dict[str, Any]:
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
