"""What chat templates write around tool calls and their results."""

import re
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar, cast

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ...data.formats import common_prefix_length
from ...data.templates import USER, reads_responses, render_probe

ProcessingClass: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin
T = TypeVar("T")

# A conversation that templates render to find out how they write calls and results.
PROBE_NAME = "look_up"
PROBE_ARGUMENT = "needle"
PROBE_RESULT = "found42"
# Some templates refuse calls without an id, or with one that has not nine letters.
PROBE_CALL = {
    "type": "function",
    "id": "call00000",
    "function": {"name": PROBE_NAME, "arguments": {"word": PROBE_ARGUMENT}},
}
PROBE_TOOL_MESSAGE = {
    "role": "tool",
    "name": PROBE_NAME,
    "content": PROBE_RESULT,
    "tool_call_id": PROBE_CALL["id"],
}
PROBE_TURN: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}
# Templates that drop the reasoning of earlier turns keep a turn that has `reasoning_content`.
PROBE_TURN_WITH_REASONING = PROBE_TURN | {"reasoning_content": "so"}

FUNCTION_TAG = r"<function=(?P<name>[^>\n]+)>"
PARAMETER_TAG = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
UNKNOWN_FORMAT = (
    "chat template writes a tool call in an unknown format: {!r:.200}. "
    "Set tokenizer.response_template, which says how to parse it."
)

# The known formats of calls, as fields of a `response_template`.
TAGGED = {
    "open_pattern": r"\s*<tool_call>\s*(?=\{)",
    "close": "</tool_call>",
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
NESTED = {
    "open_pattern": rf"\s*<tool_call>\s*{FUNCTION_TAG}",
    "close_pattern": r"</function>\s*</tool_call>",
    "content": "xml-inline",
    "content_args": {"tag_pattern": PARAMETER_TAG},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
BARE = {
    "open_pattern": r"\s*(?:<\|python_tag\|>)?\s*(?=\{\s*\"name\")",
    "content": "json",
    "transform": {
        "type": "function",
        "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
    },
}


def supports_tool_calling(processing_class: ProcessingClass) -> bool:
    """Whether the chat template renders a call's name and argument, and a tool's result."""
    try:
        text = render_probe(processing_class, [USER, PROBE_TURN, PROBE_TOOL_MESSAGE])
    except Exception:  # a template may raise any error
        return False
    return all(word in text for word in (PROBE_NAME, PROBE_ARGUMENT, PROBE_RESULT))


def is_chat_template_prefix_preserving(processing_class: ProcessingClass) -> bool:
    """Whether a tool's result leaves the tokens of earlier turns unchanged."""
    messages = [USER, PROBE_TURN]
    before = _render_ids(processing_class, messages)
    with_result = _render_ids(
        processing_class, [*messages, PROBE_TOOL_MESSAGE], add_generation_prompt=True
    )
    return with_result[: len(before)] == before


def render_call(processing_class: ProcessingClass, **template_kwargs: object) -> str:
    """Render an assistant turn that calls `PROBE_NAME` with `word=PROBE_ARGUMENT`."""
    prompt = render_probe(processing_class, [USER], add_generation_prompt=True, **template_kwargs)
    conversation = render_probe(processing_class, [USER, PROBE_TURN], **template_kwargs)
    return conversation.removeprefix(prompt)


def add_response_schema(processing_class: T) -> T:
    """Let a tokenizer, or that of a processor, parse what its model writes: `parse_response`.

    Sets `response_template` to a template made of what the chat template writes around content, a
    tool call and reasoning in `<think>` tags; one that is set already stays. ValueError: there are
    several chat templates, or the template does not render calls and results in a known format.
    """
    tokenizer = cast(
        PreTrainedTokenizerBase, getattr(processing_class, "tokenizer", processing_class)
    )
    if reads_responses(tokenizer):
        return processing_class
    template = getattr(processing_class, "chat_template", None)
    if not isinstance(template, str):
        raise ValueError("The chat template must be one text, not several by name.")
    source = cast(ProcessingClass, processing_class)
    if not supports_tool_calling(source):
        raise ValueError(
            "The chat template does not render tool calls and their results, so they cannot be "
            "parsed."
        )
    prompt = render_probe(source, [USER], add_generation_prompt=True)
    call_text = render_call(source).rstrip()
    expected_call = {key: value for key, value in PROBE_CALL.items() if key != "id"}
    fields: dict[str, dict[str, Any]] = {
        "content": {"close_pattern": _end_of_turn(tokenizer, call_text)}
    }
    if "<think>" in template:
        fields["reasoning_content"] = {"open": "<think>", "close": "</think>"}
    for call_format in (TAGGED, NESTED, BARE | fields["content"]):
        tokenizer.response_template = {
            "start_anchor": _start_of_turn(source, prompt),
            "fields": fields | {"tool_calls": call_format | {"repeats": True}},
            "defaults": {"role": "assistant"},
        }
        try:
            message = tokenizer.parse_response(call_text, prefix=prompt)
        except (KeyError, ValueError):  # calls have another format
            continue
        if message.get("tool_calls") == [expected_call]:
            return processing_class
    tokenizer.response_template = None
    raise ValueError(f"The {UNKNOWN_FORMAT.format(call_text)}")


def _start_of_turn(processing_class: ProcessingClass, prompt: str) -> str:
    """Return the text at the end of the prompt after which an assistant turn starts."""
    generation_prompt = prompt.removeprefix(render_probe(processing_class, [USER]))
    # Without a generation prompt, the turn starts after what follows the question.
    return generation_prompt.split("<think>")[0] or prompt.split(USER["content"])[-1]


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, turn: str) -> str:
    """Return a pattern of the special tokens that end a turn."""
    tokens = {token for token in tokenizer.all_special_tokens if turn.endswith(token)}
    if tokenizer.eos_token is not None:
        tokens.add(tokenizer.eos_token)
    return rf"\s*(?:{'|'.join(map(re.escape, sorted(tokens)))})"


class ToolResultEncoder:
    """Tokenizes tool results: all tokens between a turn with calls and the model's next turn.

    What the model wrote is not rendered again. The tokens are those that the template adds after an
    assistant turn of a probe conversation. `stop_ids` end a turn, and `template_kwargs` are extra
    arguments of every chat-template call. ValueError: the template does not render tool calls, or
    changes earlier turns when a tool's result follows.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        template_kwargs: dict[str, Any] | None = None,
    ):
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs or {}
        if not tokenizer.chat_template:
            raise ValueError("tools need a chat template; the tokenizer has none.")
        if not supports_tool_calling(tokenizer):
            raise ValueError(
                "tools: the chat template of the tokenizer does not render tool calls and their "
                "results. Use a model whose template does, or set tokenizer.chat_template."
            )
        prompt_length = len(self._render_ids())
        for turn in (PROBE_TURN, PROBE_TURN_WITH_REASONING):
            before = self._render_ids(turn)
            # The turn ends with its stop token, or with the text if it has none.
            stops = [index for index, token in enumerate(before) if token in stop_ids]
            has_stop = bool(stops) and stops[-1] >= prompt_length
            self._length = stops[-1] + 1 if has_stop else len(before)
            self._turn = turn
            with_result = self._render_ids(turn, PROBE_TOOL_MESSAGE)
            if with_result[: self._length] == before[: self._length]:
                return
        first_change = common_prefix_length(before, with_result)
        raise ValueError(
            "tools: the chat template is not prefix-preserving: a tool's result changes the turns "
            f"before it, from token {first_change} of {before!r:.200}: "
            f"{self._tokenizer.decode(before[first_change:])!r:.80} becomes "
            f"{self._tokenizer.decode(with_result[first_change:])!r:.80}. Change "
            "tokenizer.chat_template so that later messages do not change how a turn is rendered."
        )

    def encode(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Return the token ids of messages with the role `tool` and of the generation prompt."""
        results = [message | {"tool_call_id": PROBE_CALL["id"]} for message in messages]
        return self._render_ids(self._turn, *results)[self._length :]

    def _render_ids(self, *messages: dict[str, Any]) -> list[int]:
        """Render the probe's question and `messages`, of which the first is an assistant turn."""
        options = {"add_generation_prompt": len(messages) > 1} | self._template_kwargs
        return _render_ids(self._tokenizer, [USER, *messages], **options)


def _render_ids(
    processing_class: ProcessingClass, messages: list[dict[str, Any]], **options: object
) -> list[int]:
    options |= {"tokenize": True, "return_dict": True}
    return list(render_probe(processing_class, messages, **options)["input_ids"])
