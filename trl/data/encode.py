"""Texts and conversations as token ids, a batch at a time."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

from ..ops.masking import common_prefix_length
from .bounds import ModelBounds
from .formats import Processor, prepare_multimodal_messages, prompt_ending, text_of_parts
from .templates import naming_template, reads_parts

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

Ids = list[int]
Chat = Sequence[dict[str, Any]]
Options = Mapping[str, Any]  # of a template, such as tools
Span = tuple[int, int]  # the first character, and the one behind the last
Marked = tuple[list[str], list[list[Span]]]  # texts, and spans of each
Masked = tuple[Ids, np.ndarray, int]  # ids, a mask (tokens,), its tokens that begin before it

TAIL = 32  # characters that a text shares with the one before it, but that are encoded again
AGREEING = 4  # tokens of the tail that must be those of the text before
# Words whose tokens a tokenizer remembers. With 10,000, its default, encoding takes a sixth longer.
CACHED_WORDS = 100_000
WORD_END = re.compile(r".*[^\W\d_](?= [^\W\d_])", re.DOTALL)


class TextEncoder:
    """Turns strings and conversations into token ids, with a tokenizer or that of a processor.

    `bounds` are those of the model that is to read them; they change no ids.
    """

    def __init__(self, processing_class: Processor, bounds: ModelBounds | None = None):
        self.bounds = bounds or ModelBounds()
        self.tokenizer = getattr(processing_class, "tokenizer", processing_class)
        self._is_processor = self.tokenizer is not processing_class
        self._template = processing_class.chat_template if self._is_processor else None
        self._core = self.tokenizer.backend_tokenizer if self.tokenizer.is_fast else None
        self._reads_parts: dict[str, bool] = {}  # by template
        # Without words, a character may change tokens far from it.
        self._splits_words = self._core is not None and self._core.pre_tokenizer is not None

    @cached_property
    def begin(self) -> Ids:
        """What the tokenizer puts before a plain text, such as BOS."""
        full = self.tokenizer("a", add_special_tokens=True)["input_ids"]
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return list(full[:start])
        return []

    @cached_property
    def eos(self) -> int:
        """The token that ends a plain text; a ValueError if the tokenizer has none."""
        if self.tokenizer.eos_token_id is None:
            raise ValueError(
                "The tokenizer has no EOS token, so the end of plain text cannot be learned. "
                "Set tokenizer.eos_token, or the option eos_token."
            )
        return int(self.tokenizer.eos_token_id)

    @cached_property
    def digest(self) -> str:
        """A hash of everything that decides which ids a text becomes."""
        tokenizer = self.tokenizer
        core = self._core.to_str() if self._core is not None else repr(tokenizer)
        template = self._template or tokenizer.chat_template
        facts = [core, template, tokenizer.special_tokens_map, self.begin, transformers.__version__]
        return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()

    @cached_property
    def special(self) -> str:
        """A pattern that matches any special token."""
        added = self.tokenizer.added_tokens_decoder.values()
        texts = {*self.tokenizer.all_special_tokens, *(t.content for t in added if t.special)}
        return f"(?:{'|'.join(map(re.escape, sorted(texts))) or '(?!)'})"

    def ids(self, texts: Sequence[str]) -> list[Ids]:
        """Encode texts as they are, with nothing added."""
        if self._core is None:
            return [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        encodings = self._encodings(self._core.encode_batch_fast, texts)
        return [encoding.ids for encoding in encodings]

    def masked(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Masked]:
        """Encode texts as they are, and mark (tokens,) what stands for characters of their spans.

        What texts next to each other share before their spans is encoded once. A slow tokenizer
        does not know the characters of a token: spans but the end of a text are a ValueError.
        """
        if self._core is None:
            return list(map(self._masked_end, texts, spans))
        if list(map(list, spans)) == whole_texts(texts):
            return [(ids, np.ones(len(ids), dtype=bool), 0) for ids in self.ids(texts)]
        cuts = self._cuts(texts, spans)
        tails = [text[cut:] for text, cut in zip(texts, cuts, strict=True)]
        encodings = self._encodings(self._core.encode_batch, tails)
        masked: list[Masked] = []
        whole: Encoding | None = None
        for encoding, text_spans, cut in zip(encodings, spans, cuts, strict=True):
            tail_spans = [(start - cut, stop - cut) for start, stop in text_spans]
            tail_mask, merged = _mask(encoding, tail_spans)
            before: Ids | None = []
            if cut and whole is not None:
                before = _before(whole, cut, text_spans[0][0], encoding.ids)
            else:
                whole = encoding
            if before is None:
                self._splits_words = False
                return self.masked(texts, spans)
            mask = np.concatenate([np.zeros(len(before), dtype=bool), tail_mask])
            masked.append((before + encoding.ids, mask, merged))
        return masked

    def _cuts(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[int]:
        """Where each text must be encoded from: what is before is as in the last whole text."""
        cuts: list[int] = []
        whole = ""
        for text, text_spans in zip(texts, spans, strict=True):
            start = text_spans[0][0] if text_spans else 0
            is_shared = self._splits_words and text[:start] == whole[:start]
            word = WORD_END.match(text, 0, start - TAIL) if is_shared and start > TAIL else None
            cuts.append(word.end() if word else 0)
            whole = text if word is None else whole
        return cuts

    def _masked_end(self, text: str, spans: Sequence[Span]) -> Masked:
        start, stop = spans[0] if len(spans) == 1 else (0, 0)
        if stop != len(text):
            raise ValueError(
                "The turns of the assistant cannot be located in the tokens of a slow tokenizer. "
                "Use prompt-completion data, or a fast tokenizer."
            )
        before, whole = self.ids([text[:start], text])
        first = common_prefix_length(before, whole)
        return whole, np.arange(len(whole)) >= first, int(first < len(before))

    def _encodings(
        self, encode: Callable[..., list[Encoding]], texts: Sequence[str]
    ) -> list[Encoding]:
        # Calls of the tokenizer leave their settings behind.
        core = self.tokenizer.backend_tokenizer
        core.no_truncation()
        core.no_padding()
        remember_words(core, CACHED_WORDS)
        return encode(list(texts), add_special_tokens=False)

    def closed(self, ids: Ids, mask: np.ndarray, merged: int) -> Masked:
        """Put a plain text between BOS, and an EOS that is trained, unless they stand there."""
        before = [] if ids[: len(self.begin)] == self.begin else self.begin
        behind = [] if mask[-1:].any() and ids[-1] == self.eos else [self.eos]
        sides = np.zeros(len(before), dtype=bool), mask, np.ones(len(behind), dtype=bool)
        return before + ids + behind, np.concatenate(sides), merged

    def render_all(
        self, chats: Sequence[Chat], options: Sequence[Options], **ending: Any
    ) -> list[str]:
        """Render conversations with the chat template, each with its `options`."""
        texts: list[str] = []
        for same_options, prepared in self._alike(chats, options):
            arguments = {"chat_template": self._template, **same_options, **ending}
            with naming_template(self.tokenizer, self._template):
                texts += self.tokenizer.apply_chat_template(prepared, tokenize=False, **arguments)
        return texts

    def render_prompts(self, prompts: Sequence[Chat], options: Sequence[Options]) -> list[str]:
        """Render prompts up to where answers begin.

        A template may render the end differently once an answer follows: then they begin before it.
        """
        pairs = zip(options, map(prompt_ending, prompts), strict=True)
        return self.render_all(prompts, [{**options, **ending} for options, ending in pairs])

    def render_marked(self, chats: Sequence[Chat], options: Sequence[Options]) -> Marked:
        """Render conversations, with the characters (start, stop) inside generation markers."""
        texts: list[str] = []
        spans: list[list[tuple[int, int]]] = []
        for same_options, prepared in self._alike(chats, options):
            with naming_template(self.tokenizer, self._template):
                rendered, marked = render_jinja_template(
                    [list(map(_without_missing_keys, chat)) for chat in prepared],
                    chat_template=self.chosen_template(same_options),
                    return_assistant_tokens_mask=True,
                    **self.tokenizer.special_tokens_map | dict(same_options),
                )
            texts += rendered
            spans += marked
        return texts, spans

    def _alike(
        self, chats: Sequence[Chat], options: Sequence[Options]
    ) -> Iterator[tuple[Options, list[Chat]]]:
        """Runs of conversations with equal options, which are rendered much faster in one call."""
        for same_options, rows in groupby(zip(chats, options, strict=True), key=itemgetter(1)):
            yield same_options, [self._with_contents(chat, same_options) for chat, _ in rows]

    def _with_contents(self, chat: Chat, options: Options) -> Chat:
        """A conversation with contents as the template reads them: parts, or their text."""
        if self._is_processor:
            return prepare_multimodal_messages(list(chat))
        if not any(isinstance(message.get("content"), list) for message in chat):
            return list(chat)
        template = self.chosen_template(options)
        if template not in self._reads_parts:
            self._reads_parts[template] = reads_parts(self.tokenizer, template)
        return list(map(with_parts if self._reads_parts[template] else with_text, chat))

    def chosen_template(self, options: Options) -> str:
        """The chat template for these options: a tokenizer may have one of its own for tools."""
        return self.tokenizer.get_chat_template(self._template, options.get("tools"))


def with_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the text of its parts as content, for templates that read text alone.

    Results of tools may be any list; other parts than text are a ValueError.
    """
    content = text_of_parts(message.get("content"))
    if isinstance(content, list) and message["role"] != "tool":
        types = [part.get("type") if isinstance(part, dict) else part for part in content]
        wrong = next((part_type for part_type in types if part_type != "text"), "text without text")
        raise ValueError(
            f"the content of a message of the {message['role']} has a part {wrong!r:.40}, but the "
            "chat template reads text alone: a string, or parts such as "
            '{"type": "text", "text": "..."}.'
        )
    return message | {"content": content}


def with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose parts have no keys without value, which datasets add to them."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return message | {
        "content": [
            _without_missing_keys(part) if isinstance(part, dict) else part for part in content
        ]
    }


def _without_missing_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def whole_texts(texts: Sequence[str]) -> list[list[Span]]:
    """All characters of each text, as one span."""
    return [[(0, len(text))] for text in texts]


def _before(whole: Encoding, cut: int, start: int, ids: Ids) -> Ids | None:
    """The tokens of a text before a cut, if the ones behind it begin like `ids`."""
    first = _token_at(whole, cut)
    stop = _token_at(whole, start)
    agreeing = min(max(stop - first - 1, 1), AGREEING)  # the last token may merge
    whole_ids: Ids = whole.ids[: first + agreeing]
    return whole_ids[:first] if whole_ids[first:] == ids[:agreeing] else None


def _mask(encoding: Encoding, spans: Sequence[Span]) -> tuple[np.ndarray, int]:
    """Mark the tokens that stand for characters of spans; count those that begin before theirs."""
    trained = np.zeros(len(encoding), dtype=bool)
    merged = 0
    for start, stop in spans:
        first = _token_at(encoding, start)
        behind = _token_at(encoding, stop)
        while behind < len(encoding) and _characters(encoding, behind)[0] < stop:
            behind += 1
        if first < behind:
            # A token may leave out the space that it begins with: then nothing ends at `start`.
            edge = _characters(encoding, first - 1)[1] if first else start
            merged += _characters(encoding, first)[0] < start or edge < start
            trained[first:behind] = True
    return trained, merged


def _characters(encoding: Encoding, token: int) -> Span:
    """The characters that a token stands for."""
    return encoding.token_to_chars(token) or (0, 0)


def _token_at(encoding: Encoding, position: int) -> int:
    """The first token that stands for the character at a position, or for one behind it."""
    if (token := encoding.char_to_token(position)) is not None:
        return int(token)
    end = _characters(encoding, len(encoding) - 1)[1] if len(encoding) else 0
    tokens = map(encoding.char_to_token, range(position, end))
    return next((token for token in tokens if token is not None), len(encoding))


def template_options(row: Mapping[str, Any]) -> dict[str, Any]:
    """Read a row's tools (a list, or JSON) and `chat_template_kwargs`; None means none."""
    tools = _json_value(row, "tools")
    if not isinstance(tools, Sequence | None):
        raise TypeError(f"tools must be a list of tools, not {tools!r:.60}.")
    kwargs = _json_value(row, "chat_template_kwargs")
    if not isinstance(kwargs, Mapping | None):
        raise TypeError(f"chat_template_kwargs must be a mapping, not {kwargs!r:.60}.")
    return {"tools": tools or None, **_without_missing_keys(kwargs or {})}


def _json_value(row: Mapping[str, Any], name: str) -> object:
    value = row.get(name)
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not valid JSON: {error}.") from None


def remember_words(core: Tokenizer, count: int) -> None:
    """Let a fast tokenizer keep the tokens of `count` words, where its kind of model keeps any.

    tokenizers 0.23 can otherwise be told so only when a model is made.
    """
    if hasattr(core.model, "_resize_cache"):
        core.model._resize_cache(count)
