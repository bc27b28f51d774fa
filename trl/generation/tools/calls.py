"""Tool calls: parse them from a turn, run them, and render results and errors for the model."""

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
from .templates import (
    FUNCTION_TAG,
    PARAMETER_TAG,
    PROBE_ARGUMENT,
    PROBE_NAME,
    UNKNOWN_FORMAT,
    render_call,
)

Functions = Mapping[str, Callable[..., Any]]  # tools by name
TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
NESTED = re.compile(rf"\s*{FUNCTION_TAG}(?P<body>.*?)</function>\s*\Z", re.DOTALL)
# A turn that is nothing but one JSON object with a name.
BARE = re.compile(r'\A\s*(?:<\|python_tag\|>)?\s*(\{(?=.*"name").*\})\s*\Z', re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote; `problem` says why it cannot be made, if it cannot."""

    name: str
    arguments: dict[str, Any]
    problem: str | None = None

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Make a call of `{"name": ..., "arguments": {...}}` or `{"function": {...}}`."""
        if isinstance(value, dict):
            value = value.get("function", value)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return cls.malformed("it must be an object with a name and arguments", value)
        arguments = value.get("arguments", value.get("parameters")) or {}
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):  # a string remains, which is refused below
                arguments = json.loads(arguments)
        arguments = without_surrogates(arguments)
        if not isinstance(arguments, dict):
            return cls.malformed("its arguments must be an object", value)
        return cls(without_surrogates(value["name"]), arguments)

    @classmethod
    def malformed(cls, reason: str, value: object) -> Self:
        """Make a call that fails with a message about `value`, which is no valid call."""
        return cls("", {}, f"malformed tool call ({reason}): {value!r:.200}")


Turn = tuple[dict[str, Any], list[ToolCall]]  # the message and its calls


def read_calls(
    pattern: re.Pattern[str], text: str, schemas: Sequence[dict[str, Any]]
) -> tuple[str, list[ToolCall]]:
    """Split a turn into its text without calls, and its calls.

    The first group of `pattern` is a call in JSON or in nested `<function=...>` tags.
    """
    calls = [_read_call(match[1], schemas) for match in pattern.finditer(text)]
    if calls:
        text = pattern.sub("", text).strip()
    return text, calls


def _read_call(body: str, schemas: Sequence[dict[str, Any]]) -> ToolCall:
    match = NESTED.match(body)
    if match is None:
        try:
            return ToolCall.from_json(json.loads(body))
        except (ValueError, RecursionError) as error:
            return ToolCall.malformed(f"it is not JSON: {error}", body.strip())
    name = match["name"].strip()
    functions = {schema["function"]["name"]: schema["function"] for schema in schemas}
    properties = functions[name]["parameters"]["properties"] if name in functions else {}
    arguments: dict[str, Any] = {}
    for key, value in re.findall(PARAMETER_TAG, match["body"], re.DOTALL):
        key = key.strip()
        arguments[key] = value
        if properties.get(key, {}).get("type") != "string":
            with contextlib.suppress(ValueError):  # text that is no JSON stays as it is
                arguments[key] = without_surrogates(json.loads(value))
    return ToolCall(name, arguments)


class ToolCallParser:
    """Parses the turns of a model.

    A tokenizer with a `response_template` parses them itself. Otherwise this finds out how the chat
    template, called with `template_kwargs`, writes calls, and reads that format. An unknown format
    is a ValueError.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        schemas: Sequence[dict[str, Any]],
        template_kwargs: dict[str, Any] | None = None,
    ):
        self._tokenizer = tokenizer
        self._schemas = list(schemas)
        self._special_tokens = [token for token in tokenizer.all_special_tokens if token]
        self._pattern: re.Pattern[str] | None = None  # None: the tokenizer parses
        if reads_responses(tokenizer):
            return
        probe = render_call(tokenizer, **(template_kwargs or {}))
        expected = ToolCall(PROBE_NAME, {"word": PROBE_ARGUMENT})
        for pattern in (TAGGED, BARE):
            _, calls = read_calls(pattern, self._without_special_tokens(probe), schemas)
            if expected in calls:
                self._pattern = pattern
                return
        raise ValueError(f"tools: the {UNKNOWN_FORMAT.format(probe)}")

    def __call__(self, prompt_ids: Sequence[int], turn_ids: Sequence[int]) -> Turn:
        """Return the assistant message of a turn, and its calls in order.

        `turn_ids` are the tokens of the turn without the stop token; `prompt_ids` all before it.
        """
        if self._pattern is None:
            message, calls = self._parse_by_tokenizer(prompt_ids, turn_ids)
        else:
            message, calls = self._parse_by_pattern(self._pattern, turn_ids)
        if calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        return message, calls

    def _parse_by_tokenizer(self, prompt_ids: Sequence[int], turn_ids: Sequence[int]) -> Turn:
        try:
            message = read_response(self._tokenizer, prompt_ids, turn_ids, self._schemas)
            values = message.pop("tool_calls", None) or []
            calls = [ToolCall.from_json(value) for value in values]
            return without_surrogates(message), calls
        except Exception as error:  # the tokenizer's parser may raise anything
            text = self._tokenizer.decode(list(turn_ids))
            message = {"role": "assistant", "content": self._without_special_tokens(text)}
            return message, [ToolCall.malformed(str(error), text)]

    def _parse_by_pattern(self, pattern: re.Pattern[str], turn_ids: Sequence[int]) -> Turn:
        text, calls = read_calls(pattern, self._tokenizer.decode(list(turn_ids)), self._schemas)
        if calls:
            content = self._without_special_tokens(text)
        else:
            content = self._tokenizer.decode(list(turn_ids), skip_special_tokens=True)
        return {"role": "assistant", "content": content}, calls

    def _without_special_tokens(self, text: str) -> str:
        for token in self._special_tokens:
            text = text.replace(token, "")
        return text


@dataclass(frozen=True)
class ToolResult:
    """What the model reads about one of its calls."""

    name: str  # of the tool
    content: str
    failed: bool = False

    @classmethod
    def from_outcome(cls, name: str, outcome: Outcome) -> Self:
        """Render the outcome of a call: text as it is, other values as JSON, failures as errors."""
        if outcome.failure is None and not isinstance(outcome.value, str):
            outcome = Outcome.of(functools.partial(json_text, outcome.value))
        if outcome.failure is None:
            return cls(name, without_surrogates(outcome.value))
        if isinstance(outcome.failure, CallTimeout):
            return cls.error(name, f"the call {outcome.error_text}")
        return cls.error(name, outcome.error_text)

    @classmethod
    def error(cls, name: str, message: str) -> Self:
        """The result of a call that could not be made, or that failed."""
        return cls(name, json_text({"error": message}), failed=True)


class ToolRunner:
    """Runs the tools of a run: functions with type hints and a docstring in Google style.

    Plain functions run one after the other, in a thread of their own so that a call takes at most
    `timeout` seconds; without a timeout, in the calling thread. Coroutine functions run
    concurrently on one event loop. Names of tools must be unique.
    """

    def __init__(self, tools: Sequence[Callable[..., Any]], timeout: float | None):
        if not isinstance(tools, Sequence):
            raise TypeError(f"tools must be a list of functions, not {tools!r:.80}.")
        self.schemas = [tool_schema(tool) for tool in tools]
        names = [schema["function"]["name"] for schema in self.schemas]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"tools: two tools are named {name!r}; rename one.")
        self.by_name = dict(zip(names, tools, strict=True))
        self._timed_calls = TimedCalls(timeout)

    def __call__(
        self, calls: Sequence[ToolCall], functions: Sequence[Functions] | None = None
    ) -> list[ToolResult]:
        """Make all calls and return their results in order. Errors of a tool become its result.

        `functions` has the tools that each call may name, by default all tools of the run.
        """
        results: dict[int, ToolResult] = {}  # by index of the call
        functions_to_run: dict[int, Callable[[], Any]] = {}
        if functions is None:
            functions = [self.by_name] * len(calls)
        for index, (call, tools) in enumerate(zip(calls, functions, strict=True)):
            problem = call.problem or _unknown_tool(call.name, tools)
            if problem is None:
                arguments = copy_containers(call.arguments)
                functions_to_run[index] = functools.partial(tools[call.name], **arguments)
            else:
                results[index] = ToolResult.error(call.name, problem)
        outcomes = self._timed_calls(list(functions_to_run.values()))
        for index, outcome in zip(functions_to_run, outcomes, strict=True):
            results[index] = ToolResult.from_outcome(calls[index].name, outcome)
        return [results[index] for index in range(len(calls))]


def _unknown_tool(name: str, tools: Functions) -> str | None:
    """Return an error message if there is no tool of that name."""
    if name in tools:
        return None
    all_names = f" There are: {', '.join(tools)}." if tools else ""
    return f"there is no tool {name!r}.{did_you_mean(name, tools, all_names)}"


def tool_schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a tool, made of its type hints and docstring.

    TypeError: it is no function or method. ValueError: a type hint or description is missing.
    """
    if not inspect.isfunction(tool) and not inspect.ismethod(tool):
        raise TypeError(f"tools: {tool!r:.80} is not a function or method.")
    try:
        return get_json_schema(tool)
    except Exception as error:  # of several types, all about the signature or docstring
        raise ValueError(
            f"tools: {tool.__name__!r} has no schema: {error} A tool needs a type hint for each "
            "argument, and a docstring with a summary and an 'Args:' section that describes each."
        ) from error
