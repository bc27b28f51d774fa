"""Chat templates: markers, copies, and what they write around tool calls and their results."""

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from .formats import common_prefix_length

T = TypeVar("T")
MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
TRAINING = Path(__file__).parents[1] / "templates" / "training_chat_template.jinja"
NAME, ARGUMENT, RESULT = "look_up", "needle", "found42"
USER = {"role": "user", "content": "ask"}
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

# Ways in which templates write calls, as fields of a `response_template`.
TAGGED = {
    "open_pattern": r"\s*<tool_call>\s*(?=\{)",
    "close": "</tool_call>",
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
NESTED = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
    },
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


def has_generation_markers(template: str | Mapping[str, str]) -> bool:
    """Whether a chat template marks what the assistant writes with `{% generation %}`.

    Of several by name, "default" counts; without any, that is a TypeError.
    """
    return MARKER.search(_default(template)) is not None


def _default(template: str | Mapping[str, str]) -> str:
    if template is None:
        raise TypeError("The tokenizer has no chat template.")
    return template if isinstance(template, str) else template["default"]


def is_chat_template_prefix_preserving(processing_class: Any) -> bool:
    """Whether a tool's result leaves the tokens of the turns before it as they were."""
    call = [USER, ASSISTANTS[0]]
    before = _probe_ids(processing_class, call)
    found = _probe_ids(processing_class, [*call, RESPONSE], add_generation_prompt=True)
    return found[: len(before)] == before


def get_training_chat_template(
    processing_class: Any = None, *, tokenizer: Any = None
) -> str | None:
    """Make a chat template that renders as the tokenizer's does, with generation markers.

    `assistant_only_loss` does not need it: turns are found with any template. The tokenizer, or
    processor, is left as it is; `tokenizer` is an older name of it. None: its template has markers
    already. TypeError: it has no template. ValueError: later messages change how a turn is
    rendered.
    """
    if processing_class is not None and tokenizer is not None:
        raise TypeError("Give processing_class alone; tokenizer is an older name of it.")
    processing_class = tokenizer if processing_class is None else processing_class
    template = _default(processing_class.chat_template)
    if has_generation_markers(template):
        return None
    marked = TRAINING.read_text(encoding="utf-8").replace("TEMPLATE", template)
    talk = [USER, {"role": "assistant", "content": "one"}] * 2 + [USER]
    try:  # the template says itself when a turn does not stay as it was
        render_probe(processing_class, talk, chat_template=marked, add_generation_prompt=True)
    except TemplateError as error:
        raise ValueError(
            "No training template can be made of this chat template: later messages change how a "
            "turn of the assistant is rendered. assistant_only_loss=True works without one."
        ) from error
    return marked


def clone_chat_template(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source_tokenizer_path: str,
    resize_to_multiple_of: int | None = 64,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[int]]:
    """Give a tokenizer the chat template, the added tokens and the EOS token of another one.

    The tokenizer is changed in place; the model's embeddings are resized, and its configurations
    get the new EOS token. The vocabulary is rounded up to a multiple, if there is one, with tokens
    called `<extra_id_0>` and so on. Returns model, tokenizer, and the ids of the tokens that are
    new. ValueError: the other tokenizer has no chat template.
    """
    missing = take_template(tokenizer, source_tokenizer_path)
    model.config.eos_token_id = tokenizer.eos_token_id
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    # A model may have more embeddings than its tokenizer has tokens; none of them is lost.
    size = max(model.get_input_embeddings().num_embeddings, len(tokenizer))
    step = resize_to_multiple_of or 1
    size = -(-size // step) * step
    model.resize_token_embeddings(size)
    known = tokenizer.get_vocab()
    names = (f"<extra_id_{i}>" for i in range(size + len(tokenizer)))
    fillers = [name for name in names if name not in known][: size - len(tokenizer)]
    tokenizer.add_tokens(fillers)
    return model, tokenizer, tokenizer.convert_tokens_to_ids(missing + fillers)


def take_template(tokenizer: PreTrainedTokenizerBase, path: str) -> list[str]:
    """Give a tokenizer the chat template and EOS token of another one, and return added tokens."""
    source = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = source.get_chat_template()
    known = tokenizer.get_vocab()
    missing = [t for t in source.added_tokens_decoder.values() if t.content not in known]
    tokenizer.add_tokens(missing)
    tokenizer.eos_token = source.eos_token
    return [token.content for token in missing]


# --- Tool calls ---


def supports_tool_calling(processing_class: PreTrainedTokenizerBase | ProcessorMixin) -> bool:
    """Whether the chat template shows a call's name and argument, and a tool's result."""
    try:
        text = render_probe(processing_class, [USER, ASSISTANTS[0], RESPONSE])
    except Exception:  # a template may refuse by any error of its own
        return False
    return all(word in text for word in (NAME, ARGUMENT, RESULT))


def rendered_call(tokenizer: PreTrainedTokenizerBase, **template_kwargs: Any) -> str:
    """Return the text of an assistant turn that calls `NAME` with `word=ARGUMENT`."""
    before = render_probe(tokenizer, [USER], add_generation_prompt=True, **template_kwargs)
    whole = render_probe(tokenizer, [USER, ASSISTANTS[0]], **template_kwargs)
    return whole.removeprefix(before)


def render_probe(processing_class: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    """Render a conversation, by default as text; templates may change what they are given."""
    options = {"tokenize": False} | options
    return processing_class.apply_chat_template(copy.deepcopy(messages), **options)


def _probe_ids(processing_class: Any, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    options |= {"tokenize": True, "return_dict": True}
    return list(render_probe(processing_class, messages, **options)["input_ids"])


def reads_responses(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer knows how its model writes reasoning, content and tool calls."""
    return getattr(tokenizer, "response_template", None) is not None


def read_response(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    ids: Sequence[int],
    schemas: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Read one turn, without the token that ended it, with the tokenizer's `response_template`.

    The message has a `content`, empty if there is none. Text that the parser of transformers does
    not understand raises whatever it raises.
    """
    text = tokenizer.decode(list(ids), skip_special_tokens=False)
    before = tokenizer.decode(list(prompt))
    message = dict(tokenizer.parse_response(text, prefix=before, tools=list(schemas) or None))
    return {"role": "assistant"} | message | {"content": message.get("content") or ""}


def as_message(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ids: Sequence[int]
) -> dict[str, Any]:
    """Read one turn as far as that is possible; otherwise all of its text is the content."""
    if reads_responses(tokenizer):
        ended = bool(ids) and ids[-1] in tokenizer.all_special_ids
        try:
            return read_response(tokenizer, prompt, ids[:-1] if ended else ids)
        except Exception:  # a policy in training may write anything
            pass
    return {"role": "assistant", "content": tokenizer.decode(list(ids), skip_special_tokens=True)}


def add_response_schema(processing_class: T) -> T:
    """Let a tokenizer, or that of a processor, parse what its model writes: `parse_response`.

    Its `response_template` is made of what the chat template writes around an answer, a tool call
    and, in `<think>` tags, reasoning; one that is there stays. ValueError: the chat template is not
    one text, does not show calls and their results, or writes them in a way that is not known.
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
    raise ValueError(
        f"The chat template writes a tool call in a way that is not known here: {written!r:.200}. "
        "Set tokenizer.response_template, which says how to parse it."
    )


class ToolTurns:
    """The tokens that stand between a turn with tool calls and the next turn of the model.

    What the model wrote is never rendered again: the tokens are those that the template puts behind
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
