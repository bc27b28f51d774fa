"""Examples of supervised fine-tuning as token ids and the spans of them that are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from .chatml import maybe_convert_to_chatml
from .encode import Ids, TextEncoder, template_options
from .formats import malformed_prompt
from .mixture import SOURCE_COLUMN
from .preference import common_prefix_length
from .turns import assistant_spans, expanded_turns, tokens_of

Kind = Literal["tokenized", "completion", "messages", "text"]
Batch = Mapping[str, Sequence[Any]]
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class SupervisedOptions:
    """How examples become rows; the fields are those of `SFTConfig`.

    Args:
        dataset_text_field (`str`): column of plain texts.
        completion_only_loss (`bool`, *optional*): train on completions alone; None means where
            examples have a prompt and a completion.
        assistant_only_loss (`bool`): train on the turns of the assistant alone.
        expand_turns (`bool`): one target for each turn of the assistant, in the context that
            the template gives it when it is written.
        formatting_func (*optional*): makes a text of an example.
        source_column (`str`): names where an example is from.
    """

    dataset_text_field: str = "text"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    expand_turns: bool = False
    formatting_func: Callable[[dict[str, Any]], str] | None = None
    source_column: str = SOURCE_COLUMN

    def kind(self, example: Mapping[str, Any]) -> Kind:
        """Say what the examples of a dataset are, from the first of them.

        Raises:
            ValueError: if they cannot be told, or an option does not go with them.
        """
        kind = self._kind(example)
        conversational = kind == "messages" or (kind == "completion" and _is_chat(example))
        if self.completion_only_loss and kind in ("text", "messages"):
            raise ValueError(
                f"completion_only_loss=True needs examples with a prompt and a completion; these "
                f"have {sorted(example)}. Leave the option out"
                + (", or use assistant_only_loss=True." if kind == "messages" else ".")
            )
        if not conversational:
            self._check_turns(kind, example)
        return kind

    def _check_turns(self, kind: Kind, example: Mapping[str, Any]) -> None:
        masked = kind == "tokenized" and "assistant_masks" in example
        if self.expand_turns or (self.assistant_only_loss and not masked):
            name = "expand_turns" if self.expand_turns else "assistant_only_loss"
            raise ValueError(
                f"{name}=True needs conversations (messages with role and content); the examples "
                f"have {sorted(example)}."
            )

    def _kind(self, example: Mapping[str, Any]) -> Kind:
        if "input_ids" in example:
            return "tokenized"
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
            "'prompt' with 'completion', or 'input_ids'."
        )


@dataclass
class EncodedBatch:
    """Rows of a batch of examples; all lists have one entry for each row."""

    input_ids: list[Ids] = field(default_factory=list)
    trained_spans: list[list[int]] = field(default_factory=list)  # start, stop, start, stop, ...
    source: list[int] = field(default_factory=list)  # which example of the batch it is made from
    merged: list[int] = field(default_factory=list)  # tokens over the edge of what is trained

    def add(self, ids: Ids, spans: list[int], source: int, merged: int = 0) -> None:
        """Append a row."""
        self.input_ids.append(ids)
        self.trained_spans.append(spans)
        self.source.append(source)
        self.merged.append(merged)


def encode_supervised(
    batch: Batch, kind: Kind, encoder: TextEncoder, options: SupervisedOptions
) -> EncodedBatch:
    """Encode a batch of examples, of which each column is a list.

    Raises:
        ValueError: for an example that cannot be read; it is named by its place in the batch.
    """
    encode = {"tokenized": _tokenized, "completion": _completions, "messages": _conversations}
    return encode.get(kind, _texts)(batch, encoder, options)


def examples(batch: Batch) -> list[dict[str, Any]]:
    """Take the columns of a batch apart into rows."""
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def as_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Read turns with from and value, or role and content, under the roles of chat templates.

    Raises:
        TypeError: for a string.
        ValueError: for a message without role or content.
    """
    if isinstance(messages, str):
        raise TypeError(f"messages are needed where there is a string, {messages!r:.80}.")
    turns: list[Any] = maybe_convert_to_chatml({"messages": list(messages)})["messages"]
    if turns and (problem := malformed_prompt(turns)):
        raise ValueError(f"a conversation {problem}")
    if not any("from" in message for message in messages):
        return turns
    return [turn | {"role": ROLES.get(turn["role"], turn["role"])} for turn in turns]


def _is_chat(example: Mapping[str, Any]) -> bool:
    value = example["prompt"] or example["completion"]
    return not isinstance(value, str) and bool(value)


def _texts(batch: Batch, encoder: TextEncoder, options: SupervisedOptions) -> EncodedBatch:
    if options.formatting_func is None:
        texts = list(batch[options.dataset_text_field])
    else:
        texts = [options.formatting_func(row) for row in examples(batch)]
    wrong = [text for text in texts if not isinstance(text, str)]
    if wrong:
        what = "what formatting_func returns" if options.formatting_func else "the text"
        raise TypeError(f"{what} must be a string, not {wrong[0]!r:.80}.")
    rows = [encoder.ended(encoder.begun(ids)) for ids in encoder.ids(texts)]
    count = len(rows)
    spans = [[0, len(ids)] for ids in rows]
    return EncodedBatch(rows, spans, list(range(count)), [0] * count)


def _completions(batch: Batch, encoder: TextEncoder, options: SupervisedOptions) -> EncodedBatch:
    rows = examples(batch)
    if rows and _is_chat(rows[0]):
        return _chat_completions(rows, encoder, options)
    prompts, answers = list(batch["prompt"]), list(batch["completion"])
    prompt_ids = encoder.ids(prompts)
    found = EncodedBatch()
    whole, kept = encoder.continued(prompts, prompt_ids, answers)
    for i, (prompt, ids, split) in enumerate(zip(prompt_ids, whole, kept, strict=True)):
        row = encoder.ended(encoder.begun(ids))
        start = split + len(encoder.begun(ids)) - len(ids)
        start = start if options.completion_only_loss in (None, True) else 0
        found.add(row, [start, len(row)], i, int(split < len(prompt)))
    return found


def _chat_completions(
    rows: list[dict[str, Any]], encoder: TextEncoder, options: SupervisedOptions
) -> EncodedBatch:
    prompts, answers = ([as_messages(row[k]) for row in rows] for k in ("prompt", "completion"))
    chats = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    only = options.completion_only_loss in (None, True)
    if options.expand_turns:
        return _expanded_chats(chats, rows, encoder, [only * len(p) for p in prompts])
    options_of = [template_options(row) for row in rows]
    whole, kept, merged = rendered_answers(prompts, answers, options_of, encoder)
    starts = [only * count for count in kept]
    if options.assistant_only_loss:
        found = _assistant_turns(chats, rows, encoder)
        found.trained_spans = list(map(clipped, found.trained_spans, starts))
        return found
    found = EncodedBatch()
    for i, ids in enumerate(whole):
        found.add(ids, [starts[i], len(ids)], i, only * merged[i])
    return found


def _expanded_chats(
    chats: list[list[Any]], rows: list[dict[str, Any]], encoder: TextEncoder, firsts: list[int]
) -> EncodedBatch:
    found = EncodedBatch()
    for i, chat in enumerate(chats):
        options = template_options(rows[i])
        for ids, spans in expanded_turns(encoder, chat, options, firsts[i]):
            found.add(ids, spans, i)
    return found


def rendered_answers(
    prompts: Sequence[list[Any]],
    answers: Sequence[list[Any]],
    options: Sequence[Mapping[str, Any]],
    encoder: TextEncoder,
) -> tuple[list[Ids], list[int], list[int]]:
    """Render and encode prompts of messages with their answers.

    Returns:
        Ids of prompt and answer, the place where each answer begins, and 1 where the prompt
        alone ends with other tokens.
    """
    rows = list(zip(prompts, answers, options, strict=True))
    texts = [encoder.render(prompt + answer, option) for prompt, answer, option in rows]
    heads = [encoder.render(prompt, option, **_ending(prompt)) for prompt, _, option in rows]
    # A template may render the end of a prompt differently once something follows it.
    follows = [text.startswith(head) for head, text in zip(heads, texts, strict=True)]
    tails = [text[len(head) :] for head, text in zip(heads, texts, strict=True)]
    head_ids = encoder.ids(heads)
    whole, _ = encoder.continued(heads, head_ids, tails)
    others = [i for i, found in enumerate(follows) if not found]
    for i, ids in zip(others, encoder.ids([texts[i] for i in others]), strict=True):
        whole[i] = ids
    starts = [common_prefix_length(head, ids) for head, ids in zip(head_ids, whole, strict=True)]
    return whole, starts, [int(s < len(h)) for s, h in zip(starts, head_ids, strict=True)]


def _ending(prompt: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    if prompt and prompt[-1]["role"] == "assistant":
        return {"continue_final_message": True}
    return {"add_generation_prompt": True}


def _conversations(batch: Batch, encoder: TextEncoder, options: SupervisedOptions) -> EncodedBatch:
    rows = examples(batch)
    name = "messages" if "messages" in batch else "conversations"
    chats = [as_messages(row[name]) for row in rows]
    if options.assistant_only_loss and not options.expand_turns:
        return _assistant_turns(chats, rows, encoder)
    if options.expand_turns:
        return _expanded_chats(chats, rows, encoder, [0] * len(rows))
    found = EncodedBatch()
    texts = [encoder.render(c, template_options(row)) for row, c in zip(rows, chats, strict=True)]
    for i, ids in enumerate(encoder.ids(texts)):
        found.add(ids, [0, len(ids)], i)
    return found


def _assistant_turns(
    chats: list[list[Any]], rows: list[dict[str, Any]], encoder: TextEncoder
) -> EncodedBatch:
    pairs = zip(chats, rows, strict=True)
    texts = [assistant_spans(encoder, chat, template_options(row)) for chat, row in pairs]
    ids, places = encoder.ids_and_places([text for text, _ in texts])
    found = EncodedBatch()
    for i, (_, spans) in enumerate(texts):
        trained, merged = tokens_of(places[i], spans)
        found.add(ids[i], trained, i, merged)
    return found


def clipped(spans: Sequence[int], start: int = 0, stop: int | None = None) -> list[int]:
    """Cut flat token spans to the tokens from `start` on and before `stop`, counted as before."""
    found: list[int] = []
    for first, last in zip(spans[::2], spans[1::2], strict=True):
        first, last = max(first, start), last if stop is None else min(last, stop)
        if first < last:
            found += [first, last]
    return found


def _tokenized(batch: Batch, encoder: TextEncoder, options: SupervisedOptions) -> EncodedBatch:
    found = EncodedBatch()
    for i, row in enumerate(examples(batch)):
        ids = [int(token) for token in row["input_ids"]]
        found.add(ids, spans_of(_trained(ids, row, options)), i)
    return found


def _trained(ids: Ids, row: Mapping[str, Any], options: SupervisedOptions) -> np.ndarray:
    """Which tokens of a tokenized example are trained on, (tokens,) bool."""
    names = ["labels", "assistant_masks"]
    if options.completion_only_loss in (None, True):
        names.append("completion_mask")
    given = [name for name in names if row.get(name) is not None]
    for name in given:
        if len(row[name]) != len(ids):
            raise ValueError(
                f"{name} has length {len(row[name])}, and input_ids has length {len(ids)}."
            )
    trained = np.ones(len(ids), dtype=bool)
    for name in given:
        values = np.asarray(row[name])
        trained &= (values != IGNORED) if name == "labels" else values.astype(bool)
    if "labels" in given and (np.asarray(row["labels"]) != np.asarray(ids))[trained].any():
        raise ValueError(
            "labels must be the tokens of input_ids at their own places, or -100; "
            "they are shifted when the loss is computed."
        )
    return trained


def spans_of(mask: Iterable[bool]) -> list[int]:
    """Flat spans (start, stop, ...) of the true entries of a mask."""
    edges = np.diff(np.asarray(list(mask), dtype=np.int8), prepend=0, append=0)
    return np.flatnonzero(edges).tolist()
