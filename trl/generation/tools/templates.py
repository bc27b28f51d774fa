"""What chat templates write around tool calls and their results."""

import re
from collections.abc import Sequence
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ...data.formats import common_prefix_length
from ...data.templates import USER, reads_responses, render_probe

T = TypeVar("T")
NAME, ARGUMENT, RESULT = "look_up", "needle", "found42"
# Some templates refuse calls without an id, or with one that has not nine letters.
CALL = {
    "type": "function",
    "id": "call00000",
    "function": {"name": NAME, "arguments": {"word": ARGUMENT}},
}
RESPONSE = {"role": "tool", "name": NAME, "content": RESULT, "tool_call_id": CALL["id"]}
# Templates that drop the reasoning of earlier turns keep a turn that states its own.
ASSISTANTS: tuple[dict[str, Any], ...] = (
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [CALL]},
)
FUNCTION = r"<function=(?P<name>[^>\n]+)>"
PARAMETER = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
UNKNOWN = (
    "chat template writes a tool call in an unknown format: {!r:.200}. "
    "Set tokenizer.response_template, which says how to parse it."
)

# Ways in which templates write calls, as fields of a `response_template`.
TAGGED = {
    "open_pattern": r"\s*<tool_call>\s*(?=\{)",
    "close": "</tool_call>",
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
NESTED = {
    "open_pattern": rf"\s*<tool_call>\s*{FUNCTION}",
    "close_pattern": r"</function>\s*</tool_call>",
    "content": "xml-inline",
    "content_args": {"tag_pattern": PARAMETER},
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


def supports_tool_calling(processing_class: PreTrainedTokenizerBase | ProcessorMixin) -> bool:
    """Whether the chat template shows a call's name and argument, and a tool's result."""
    try:
        text = render_probe(processing_class, [USER, ASSISTANTS[0], RESPONSE])
    except Exception:  # a template may refuse by any error of its own
        return False
    return all(word in text for word in (NAME, ARGUMENT, RESULT))


def is_chat_template_prefix_preserving(processing_class: Any) -> bool:
    """Whether a tool's result leaves the tokens of the turns before it as they were."""
    call = [USER, ASSISTANTS[0]]
    before = _probe_ids(processing_class, call)
    found = _probe_ids(processing_class, [*call, RESPONSE], add_generation_prompt=True)
    return found[: len(before)] == before


def rendered_call(tokenizer: PreTrainedTokenizerBase, **template_kwargs: Any) -> str:
    """Return the text of an assistant turn that calls `NAME` with `word=ARGUMENT`."""
    before = render_probe(tokenizer, [USER], add_generation_prompt=True, **template_kwargs)
    whole = render_probe(tokenizer, [USER, ASSISTANTS[0]], **template_kwargs)
    return whole.removeprefix(before)


def add_response_schema(processing_class: T) -> T:
    """Let a tokenizer, or that of a processor, parse what its model writes: `parse_response`.

    Its `response_template` is made of what the chat template writes around an answer, a tool call
    and, in `<think>` tags, reasoning; one that is there stays. ValueError: the chat template is not
    one text, does not show calls and their results, or writes them in an unknown format.
    """
    tokenizer: Any = getattr(processing_class, "tokenizer", processing_class)
    if reads_responses(tokenizer):
        return processing_class
    template = getattr(processing_class, "chat_template", None)
    if not isinstance(template, str):
        raise ValueError("The chat template must be one text, not several by name.")
    if not supports_tool_calling(processing_class):  # type: ignore[arg-type]
        raise ValueError(
            "The chat template does not show tool calls and their results, so they cannot be read."
        )
    begun = render_probe(processing_class, [USER], add_generation_prompt=True)
    written = rendered_call(processing_class).rstrip()  # type: ignore[arg-type]
    before = render_probe(processing_class, [USER])
    # Without a beginning of its own, the answer follows the end of the question.
    anchor = begun.removeprefix(before).split("<think>")[0] or begun.split(USER["content"])[-1]
    ends = {tokenizer.eos_token, *filter(written.endswith, tokenizer.all_special_tokens)} - {None}
    end = rf"\s*(?:{'|'.join(map(re.escape, sorted(ends)))})"
    fields: dict[str, dict[str, Any]] = {"content": {"close_pattern": end}}
    call = {key: value for key, value in CALL.items() if key != "id"}
    if "<think>" in template:
        fields["reasoning_content"] = {"open": "<think>", "close": "</think>"}
    for calls in (TAGGED, NESTED, BARE | fields["content"]):
        made = {
            "start_anchor": anchor,
            "fields": fields | {"tool_calls": calls | {"repeats": True}},
        }
        tokenizer.response_template = made | {"defaults": {"role": "assistant"}}
        try:
            found = tokenizer.parse_response(written, prefix=begun)
        except (KeyError, ValueError):  # calls are written in another way
            continue
        if found.get("tool_calls") == [call]:
            return processing_class
    tokenizer.response_template = None
    raise ValueError(f"The {UNKNOWN.format(written)}")


class ToolResultEncoder:
    """The tokens that stand between a turn with tool calls and the next turn of the model.

    What the model wrote is never rendered again: the tokens are those that the template puts after
    the end of an assistant turn in a conversation of its own. `stop_ids` end a turn, and
    `template_kwargs` are extra arguments of every chat-template call. ValueError: the template
    cannot show tool calls, or changes earlier turns when a tool's result follows.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        template_kwargs: dict[str, Any] | None = None,
    ):
        self._tokenizer = tokenizer
        self._options = template_kwargs or {}
        if not tokenizer.chat_template:
            raise ValueError("tools need a chat template; the tokenizer has none.")
        if not supports_tool_calling(tokenizer):
            raise ValueError(
                "tools: the chat template of the tokenizer does not show tool calls and their "
                "results. Use a model whose template does, or set tokenizer.chat_template."
            )
        user = self._ids()
        for self._assistant in ASSISTANTS:  # that is not changed by a result
            alone = self._ids(self._assistant)
            # A turn ends behind its stop token, or with the text.
            stops = [place for place, token in enumerate(alone) if token in stop_ids]
            is_ended = bool(stops) and stops[-1] >= len(user)
            self._length = stops[-1] + 1 if is_ended else len(alone)
            followed = self._ids(self._assistant, RESPONSE)
            if followed[: self._length] == alone[: self._length]:
                return
        place = common_prefix_length(alone, followed)
        raise ValueError(
            "tools: the chat template is not prefix-preserving: a tool's result changes the turns "
            f"before it, from token {place} of {alone!r:.200}: "
            f"{self._tokenizer.decode(alone[place:])!r:.80} becomes "
            f"{self._tokenizer.decode(followed[place:])!r:.80}. Change tokenizer.chat_template so "
            "that a turn is rendered alike whatever follows it."
        )

    def after(self, results: Sequence[dict[str, Any]]) -> list[int]:
        """Return the tokens of messages with the role `tool`, and of how the next turn begins."""
        sent = [result | {"tool_call_id": CALL["id"]} for result in results]
        return self._ids(self._assistant, *sent)[self._length :]

    def _ids(self, *messages: dict[str, Any]) -> list[int]:
        options = {"add_generation_prompt": len(messages) > 1} | self._options
        return _probe_ids(self._tokenizer, [USER, *messages], **options)


def _probe_ids(processing_class: Any, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    options |= {"tokenize": True, "return_dict": True}
    return list(render_probe(processing_class, messages, **options)["input_ids"])
