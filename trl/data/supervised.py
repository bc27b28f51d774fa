"""Examples of supervised fine-tuning as token ids, and which of them are trained on."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain, groupby
from operator import add, attrgetter, itemgetter
from typing import Any, Literal, Self

import numpy as np

from ..ops.masking import common_prefix_length
from .conversations import (
    Chat,
    advice_on_instructions,
    align_answers,
    as_messages,
    check_roles,
)
from .encode import Ids, Marked, Masked, Options, Span, TextEncoder, template_options, whole_texts
from .examples import IGNORED
from .formats import Row
from .templates import has_generation_markers

Kind = Literal["tokenized", "completion", "messages", "text"]
Target = tuple[str, list[Span], int]  # a text, what is trained of it, and which example it is of
SOURCE_COLUMN = "dataset_source"  # of mixtures: the name of a row's dataset
STAND_IN = "\u2042STAND\u2042IN\u2042"
EMPTY_THINKING = re.compile(r"<think>\s*</think>\s*")


@dataclass(slots=True)
class EncodedDocument:
    """An example, or a part of it, as token ids."""

    input_ids: Ids
    loss_mask: np.ndarray  # (tokens,) bool
    merged: int  # tokens that begin before the part that is in the loss, and reach into it
    example: int  # position of the example in its batch
    origin: str  # the dataset of a mixture that it is from, or ""


@dataclass(frozen=True, kw_only=True)
class SupervisedOptions:
    """How examples become rows: options of `SFTConfig`, and what makes a text of an example."""

    dataset_text_field: str = "text"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    expand_turns: bool = False
    source_column: str = SOURCE_COLUMN
    formatting_func: Callable[[dict[str, Any]], str] | None = None
    dataset_kwargs: Any = None  # "skip_prepare_dataset": refuse what is not tokenized

    @classmethod
    def of(cls, args: Any, formatting_func: Callable[[dict[str, Any]], str] | None = None) -> Self:
        """Take the options of the same names."""
        names = [field.name for field in fields(cls) if field.name != "formatting_func"]
        options = {name: value for name, value in vars(args).items() if name in names}
        return cls(**options, formatting_func=formatting_func)

    @property
    def trains_prompts(self) -> bool:
        return self.completion_only_loss is False

    def kind(self, example: Mapping[str, Any]) -> Kind:
        """Say what examples are, from the first; a ValueError if it, or an option, does not fit."""
        example_kind = self._kind(example)
        if self.completion_only_loss and example_kind in ("text", "messages"):
            raise ValueError(
                f"completion_only_loss=True needs examples with a prompt and a completion; these "
                f"have {sorted(example)}. Leave the option out"
                + (", or use assistant_only_loss=True." if example_kind == "messages" else ".")
            )
        is_chat = _is_chat(example_kind, example)
        has_masks = example_kind == "tokenized" and "assistant_masks" in example
        needs_chat = self.expand_turns or (self.assistant_only_loss and not has_masks)
        if needs_chat and not is_chat:
            raise ValueError(
                f"{self.turns_option}=True needs conversations (messages with role and content); "
                f"the examples have {sorted(example)}."
            )
        return example_kind

    @property
    def turns_option(self) -> str | None:
        """The option that trains on messages of the assistant alone, if one is set."""
        if self.expand_turns:
            return "expand_turns"
        return "assistant_only_loss" if self.assistant_only_loss else None

    def advice(self, example: Mapping[str, Any]) -> str:
        """What to do if a dataset, with this first row, has nothing to train on."""
        chat = example.get("messages") or example.get("conversations")
        if self.turns_option is None or not isinstance(chat, list):
            return "Check the masks of the dataset."
        roles = ", ".join(dict.fromkeys(turn["role"] for turn in as_messages(chat)))
        return (
            f"{self.turns_option}=True trains on messages of the role 'assistant'; row 0 has the "
            f"roles {roles}."
        )

    def _kind(self, example: Mapping[str, Any]) -> Kind:
        if "input_ids" in example:
            return "tokenized"
        if (self.dataset_kwargs or {}).get("skip_prepare_dataset"):
            raise ValueError(
                "skip_prepare_dataset needs a column 'input_ids'; the dataset has "
                f"{', '.join(example)}."
            )
        if self.formatting_func is not None:
            return "text"
        if {"prompt", "completion"} <= example.keys():
            return "completion"
        if "messages" in example or "conversations" in example:
            return "messages"
        if self.dataset_text_field in example:
            return "text"
        raise ValueError(
            f"The examples have the columns {sorted(example)}. Supervised fine-tuning takes "
            f"{self.dataset_text_field!r} (dataset_text_field), 'messages', 'conversations', "
            f"'prompt' with 'completion', or 'input_ids'.{advice_on_instructions(example)}"
        )


def encode_supervised(
    rows: Sequence[Row], example_kind: Kind, encoder: TextEncoder, options: SupervisedOptions
) -> list[EncodedDocument]:
    """Encode examples; those with several turns may become several documents."""
    if example_kind == "completion":
        rows = [_aligned(row) for row in rows]
    return encode_aligned(rows, example_kind, encoder, options)


def encode_aligned(
    rows: Sequence[Row], example_kind: Kind, encoder: TextEncoder, options: SupervisedOptions
) -> list[EncodedDocument]:
    """`encode_supervised` for prompts and completions that were aligned, see `align_answers`."""
    are_chats = [_is_chat(example_kind, row) for row in rows]
    if len(set(are_chats)) > 1:  # as columns of JSON may be
        return _of_both_forms(rows, are_chats, encoder, options)
    examples: Sequence[int] = range(len(rows))
    if all(are_chats):
        targets = _chats(rows, example_kind, encoder, options)
        examples = [example for _, _, example in targets]
        texts = [text for text, _, _ in targets]
        masked = encoder.masked(texts, [spans for _, spans, _ in targets])
    else:
        masked = _encode_texts(rows, example_kind, encoder, options)
    origins = [str(row.get(options.source_column, "")) for row in rows]
    return [
        EncodedDocument(ids, loss_mask, merged, example, origins[example])
        for (ids, loss_mask, merged), example in zip(masked, examples, strict=True)
    ]


def _encode_texts(
    rows: Sequence[Row], example_kind: Kind, encoder: TextEncoder, options: SupervisedOptions
) -> list[Masked]:
    """Encode rows that are text, or token ids already."""
    if example_kind == "tokenized":
        return [_tokenized(row, options) for row in rows]
    marked = _texts(rows, example_kind, options)
    return [encoder.closed(*masked) for masked in encoder.masked(*marked)]


def _aligned(row: Row) -> Row:
    prompt, (completion,) = align_answers(row["prompt"], {"completion": row["completion"]})
    return row | {"prompt": prompt, "completion": completion}


def _of_both_forms(
    rows: Sequence[Row], are_chats: Sequence[bool], encoder: TextEncoder, options: SupervisedOptions
) -> list[EncodedDocument]:
    """Encode prompts and completions of which some are text, and others messages."""
    documents: list[EncodedDocument] = []
    for form in (False, True):
        positions = [i for i, is_chat in enumerate(are_chats) if is_chat is form]
        some = [rows[position] for position in positions]
        for document in encode_aligned(some, "completion", encoder, options):
            document.example = positions[document.example]
            documents.append(document)
    return sorted(documents, key=attrgetter("example"))


def _is_chat(example_kind: Kind, example: Mapping[str, Any]) -> bool:
    if example_kind != "completion":
        return example_kind == "messages"
    return any(isinstance(example[column], (list, tuple)) for column in ("prompt", "completion"))


def _texts(rows: Sequence[Row], example_kind: Kind, options: SupervisedOptions) -> Marked:
    if example_kind == "completion":
        return _completions(rows, options)
    texts = list(map(options.formatting_func or itemgetter(options.dataset_text_field), rows))
    wrong = next((text for text in texts if not isinstance(text, str)), "")
    if wrong != "":
        subject = "what formatting_func returns" if options.formatting_func else "the text"
        raise TypeError(f"{subject} must be a string, not {wrong!r:.80}.")
    return texts, whole_texts(texts)


def _completions(rows: Sequence[Row], options: SupervisedOptions) -> Marked:
    if (name := options.turns_option) is not None:
        raise ValueError(f"{name}=True needs conversations, but 'completion' is text.")
    texts = [row["prompt"] + row["completion"] for row in rows]
    starts = [0 if options.trains_prompts else len(row["prompt"]) for row in rows]
    return texts, [[(start, len(text))] for start, text in zip(starts, texts, strict=True)]


def _chats(
    rows: Sequence[Row], example_kind: Kind, encoder: TextEncoder, options: SupervisedOptions
) -> list[Target]:
    prompts, answers = _conversations(rows, example_kind)
    chats = list(map(add, prompts, answers))
    settings = list(map(template_options, rows))
    skips = example_kind == "completion" and not options.trains_prompts
    if (name := options.turns_option) is not None:
        for chat in chats:
            check_roles(chat, name)
    if options.expand_turns:
        firsts = list(map(len, prompts)) if skips else [0] * len(prompts)
        expanded = map(partial(expanded_turns, encoder), chats, settings, firsts)
        return [(*target, i) for i, targets in enumerate(expanded) for target in targets]
    if options.assistant_only_loss:
        texts, spans = assistant_spans(encoder, chats, settings)
    else:
        texts = encoder.render_all(chats, settings)
        spans = list(map(without_added_thinking, texts, chats, whole_texts(texts)))
    if skips:
        heads = encoder.render_prompts(prompts, settings)
        spans = list(map(_behind, spans, map(common_prefix_length, heads, texts)))
    return list(zip(texts, spans, range(len(texts)), strict=True))


def _conversations(rows: Sequence[Row], example_kind: Kind) -> tuple[list[Chat], list[Chat]]:
    """Prompts, empty for conversations as a whole, and what follows them."""
    if example_kind == "completion":
        return [row["prompt"] for row in rows], [row["completion"] for row in rows]
    name = next(x for x in ("messages", "conversations") if x in rows[0])
    chats = [as_messages(row[name], name) for row in rows]
    if not all(chats):
        raise ValueError(f"{name!r} has no messages.")
    return [[] for _ in rows], chats


def _behind(spans: Sequence[Span], start: int) -> list[Span]:
    return [(max(first, start), stop) for first, stop in spans if stop > start]


def _tokenized(row: Row, options: SupervisedOptions) -> Masked:
    """Read ids, and which of them are in the loss, of a row that has no text."""
    ids = _checked_ids(row["input_ids"])
    names = ["labels", "assistant_masks"]
    if not options.trains_prompts:
        names.append("completion_mask")
    loss_mask = np.ones(len(ids), dtype=bool)
    for name in names:
        if row.get(name) is not None:
            loss_mask &= _mask_of_column(name, np.asarray(row[name]), ids)
    return ids.tolist(), loss_mask, 0


def _checked_ids(input_ids: Sequence[int]) -> np.ndarray:
    ids = np.asarray(input_ids)
    if ids.ndim != 1 or (len(ids) and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"input_ids must be a list of integers, not {input_ids!r:.60}.")
    if (ids < 0).any():
        position = int((ids < 0).argmax())
        raise ValueError(
            f"input_ids has the id {ids[position]} at position {position}, but ids begin with 0. "
            "To leave a token out of the loss, keep its id, and write -100 into 'labels'."
        )
    return ids


def _mask_of_column(name: str, values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The tokens that labels, or a mask, leave in the loss (tokens,) bool."""
    if len(values) != len(ids):
        raise ValueError(f"{name} must be as long as input_ids ({len(ids)}), not {len(values)}.")
    if name != "labels":
        return values.astype(bool)
    in_loss = values != IGNORED
    if (values != ids)[in_loss].any():
        raise ValueError(
            "labels must be the tokens of input_ids in the same places, or -100; "
            "they are shifted when the loss is computed."
        )
    return in_loss


def assistant_spans(
    encoder: TextEncoder, chats: Sequence[Chat], options: Sequence[Options]
) -> Marked:
    """Render conversations and find the characters that the assistant writes in them.

    A turn ends with its end-of-turn token; white space after it, and an empty thinking block that
    no message has, are not the assistant's. Turns are found by the template's generation markers,
    or by rendering again without and with them. ValueError: neither is exact for this template.
    """
    templates = [encoder.chosen_template(row_options) for row_options, _ in groupby(options)]
    if all(map(has_generation_markers, templates)):
        texts, spans = encoder.render_marked(chats, options)
    else:
        texts = encoder.render_all(chats, options)
        spans = [
            [_turn(encoder, chat, row_options, k, text) for k in _assistant_turns(chat)]
            for chat, row_options, text in zip(chats, options, texts, strict=True)
        ]
    return texts, list(map(without_added_thinking, texts, chats, spans))


def _assistant_turns(chat: Chat, first: int = 0) -> list[int]:
    return [k for k in range(first, len(chat)) if chat[k]["role"] == "assistant"]


def _turn(encoder: TextEncoder, messages: Chat, options: Options, k: int, text: str) -> Span:
    head = _attempt(encoder, messages[:k], options, add_generation_prompt=True)
    last = k + 1 == len(messages)
    through = text if last else _attempt(encoder, messages[: k + 1], options)
    start = _length_of_beginning(text, head)
    stop = _length_of_beginning(text, through)
    if start is None or stop is None:
        # The turn's content replaced shows what the template writes around it.
        stand_in = {"role": "assistant", "content": STAND_IN}
        other = _attempt(encoder, [*messages[:k], stand_in, *messages[k + 1 :]], options)
        before, _, behind = other.partition(STAND_IN)
        start = _length_of_beginning(text, before) if start is None else start
        stop = _end_before(encoder, text, behind) if stop is None else stop
    if start is None or stop is None:
        edge = "beginning" if start is None else "end"
        rendered = head if start is None else through
        at = common_prefix_length(rendered, text)
        raise ValueError(
            f"The chat template has no generation markers, and the {edge} of message {k} cannot be "
            f"found by rendering the conversation again: {rendered[at : at + 40]!r} stands where "
            f"the whole conversation has {text[at : at + 40]!r}. Use a template with generation "
            "markers, prompt-completion data, or expand_turns=True."
        )
    behind_end = re.findall(rf"{encoder.special}(\s*)\Z", text[start:stop])
    return start, stop - sum(map(len, behind_end))


def _length_of_beginning(text: str, beginning: str) -> int | None:
    return len(beginning) if beginning and text.startswith(beginning) else None


def _end_before(encoder: TextEncoder, text: str, behind: str) -> int | None:
    """Where a turn is over if `behind` follows its content: behind the first special token."""
    if not behind or not text.endswith(behind):
        return None
    special = re.match(rf"\s*{encoder.special}", behind)
    return len(text) - len(behind) + (special.end() if special else 0)


def _attempt(encoder: TextEncoder, messages: Chat, options: Options, **ending: Any) -> str:
    try:
        return encoder.render_all([messages], [options], **ending)[0]
    except Exception:  # a template refuses a part of a conversation by any error of its own
        return ""


def without_added_thinking(text: str, messages: Chat, spans: Sequence[Span]) -> list[Span]:
    """Take empty thinking blocks that the template alone has written out of spans of characters."""
    if "<think>" not in text:
        return list(spans)
    own = (EMPTY_THINKING.split(str(m.get("content")), maxsplit=1)[1:] for m in messages)
    followed = tuple(chain.from_iterable(own))
    remaining = list(spans)
    for block in EMPTY_THINKING.finditer(text):
        if not text.startswith(followed, block.end()):
            first, behind = block.span()
            sides = ([(a, min(b, first)), (max(a, behind), b)] for a, b in remaining)
            remaining = [(a, b) for a, b in chain(*sides) if a < b]
    return [(start, stop) for start, stop in remaining if text[start:stop].strip()]


def expanded_turns(
    encoder: TextEncoder, messages: Chat, options: Options, first: int = 0
) -> list[tuple[str, list[Span]]]:
    """Make one target for each turn of the assistant, in the context it has when it is written.

    Messages before `first` are none. Returns the text of each, and the characters to train on. A
    target that the next one continues unchanged is part of that one, so there may be one row alone.
    """
    targets: list[tuple[str, list[Span]]] = []
    for k in _assistant_turns(messages, first):
        chat = messages[: k + 1]
        text = encoder.render_all([chat], [options])[0]
        turn = _turn(encoder, chat, options, k, text)
        spans = without_added_thinking(text, chat[-1:], [turn])
        text = text[: turn[1]]
        if targets and text.startswith(targets[-1][0]):
            spans = targets.pop()[1] + spans
        targets.append((text, spans))
    return targets
