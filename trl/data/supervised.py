"""Examples of supervised fine-tuning as token ids, and which of them are trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import repeat
from operator import add
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from .encode import Ids, TextEncoder, template_options
from .formats import malformed_prompt, maybe_convert_to_chatml
from .mixture import SOURCE_COLUMN
from .preference import common_prefix_length
from .turns import assistant_spans, expanded_turns, leave_added_thinking, trained_tokens

Kind = Literal["tokenized", "completion", "messages", "text"]
Batch = Mapping[str, Sequence[Any]]
Chat = list[dict[str, Any]]
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class SupervisedOptions:
    """How examples become rows: options of `SFTConfig`, and what makes a text of an example."""

    dataset_text_field: str = "text"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    expand_turns: bool = False
    source_column: str = SOURCE_COLUMN
    formatting_func: Callable[[dict[str, Any]], str] | None = None

    @classmethod
    def of(cls, args: Any, formatting_func: Callable[[dict[str, Any]], str] | None = None) -> Self:
        """Take the options of the same names."""
        given = {field.name: getattr(args, field.name, None) for field in fields(cls)}
        return cls(**given | {"formatting_func": formatting_func})

    @property
    def trains_prompts(self) -> bool:
        """Whether prompts are trained on as their completions are."""
        return self.completion_only_loss is False

    def kind(self, example: Mapping[str, Any]) -> Kind:
        """Say what the examples of a dataset are, from the first of them.

        Raises:
            ValueError: if they cannot be told, or an option does not go with them.
        """
        kind = self._kind(example)
        if self.completion_only_loss and kind in ("text", "messages"):
            raise ValueError(
                f"completion_only_loss=True needs examples with a prompt and a completion; these "
                f"have {sorted(example)}. Leave the option out"
                + (", or use assistant_only_loss=True." if kind == "messages" else ".")
            )
        conversational = kind == "messages" or (kind == "completion" and _is_chat(example))
        masked = kind == "tokenized" and "assistant_masks" in example
        if self.expand_turns > conversational or self.assistant_only_loss > conversational + masked:
            name = "expand_turns" if self.expand_turns else "assistant_only_loss"
            raise ValueError(
                f"{name}=True needs conversations (messages with role and content); the examples "
                f"have {sorted(example)}."
            )
        return kind

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


class EncodedRow(NamedTuple):
    """A row of tokens."""

    ids: Ids
    trained: np.ndarray  # (tokens,) bool
    source: int  # which example of the batch it is made from
    merged: int = 0  # tokens over the edge of what is trained


def encode_supervised(
    batch: Batch, kind: Kind, encoder: TextEncoder, options: SupervisedOptions
) -> list[EncodedRow]:
    """Encode a batch of examples, of which each column is a list."""
    encode = {"tokenized": _tokenized, "completion": _completions, "messages": _conversations}
    return encode.get(kind, _texts)(examples(batch), encoder, options)


def examples(batch: Batch) -> list[dict[str, Any]]:
    """Take the columns of a batch apart into rows."""
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def as_messages(messages: Sequence[Mapping[str, Any]]) -> Chat:
    """Read turns with from and value, or role and content, under the roles of chat templates.

    Raises:
        TypeError: for a string.
        ValueError: for a message without role or content.
    """
    if isinstance(messages, str):
        raise TypeError(f"messages are needed where there is a string, {messages!r:.80}.")
    turns: Chat = maybe_convert_to_chatml({"messages": list(messages)})["messages"]
    if turns and (problem := malformed_prompt(turns)):
        raise ValueError(f"a conversation {problem}")
    if not any("from" in message for message in messages):
        return turns
    return [turn | {"role": ROLES.get(turn["role"], turn["role"])} for turn in turns]


def _is_chat(example: Mapping[str, Any]) -> bool:
    value = example["prompt"] or example["completion"]
    return not isinstance(value, str) and bool(value)


def _from(start: int, size: int) -> np.ndarray:
    """Which of the tokens of a row are trained on, if its first ones are not."""
    return np.arange(size) >= start


def _texts(
    rows: list[dict[str, Any]], encoder: TextEncoder, options: SupervisedOptions
) -> list[EncodedRow]:
    read = options.formatting_func
    texts = [read(row) if read else row[options.dataset_text_field] for row in rows]
    wrong = [text for text in texts if not isinstance(text, str)]
    if wrong:
        what = "what formatting_func returns" if read else "the text"
        raise TypeError(f"{what} must be a string, not {wrong[0]!r:.80}.")
    found = [encoder.ended(encoder.begun(ids)) for ids in encoder.ids(texts)]
    return [EncodedRow(ids, _from(0, len(ids)), i) for i, ids in enumerate(found)]


def _completions(
    rows: list[dict[str, Any]], encoder: TextEncoder, options: SupervisedOptions
) -> list[EncodedRow]:
    if rows and _is_chat(rows[0]):
        return _chat_completions(rows, encoder, options)
    prompts, answers = ([row[name] for row in rows] for name in ("prompt", "completion"))
    prompt_ids = encoder.ids(prompts)
    found = []
    pairs = zip(*encoder.continued(prompts, prompt_ids, answers), strict=True)
    for i, (ids, split) in enumerate(pairs):
        row = encoder.begun(ids)
        start = (not options.trains_prompts) * (split + len(row) - len(ids))
        row = encoder.ended(row)
        found.append(EncodedRow(row, _from(start, len(row)), i, int(split < len(prompt_ids[i]))))
    return found


def _chat_completions(
    rows: list[dict[str, Any]], encoder: TextEncoder, options: SupervisedOptions
) -> list[EncodedRow]:
    prompts, answers = ([as_messages(row[k]) for row in rows] for k in ("prompt", "completion"))
    chats = list(map(add, prompts, answers))
    only = not options.trains_prompts
    if options.expand_turns:
        return _expanded(chats, rows, encoder, [only * len(prompt) for prompt in prompts])
    settings = list(map(template_options, rows))
    texts, whole, starts, merged = rendered_answers(prompts, answers, settings, encoder)
    trained = list(map(_from, [only * start for start in starts], map(len, whole)))
    if options.assistant_only_loss:
        turns = _assistant_turns(chats, rows, encoder)
        return [row._replace(trained=row.trained & trained[row.source]) for row in turns]
    leave_added_thinking(encoder, texts, chats, trained)
    return [EncodedRow(ids, trained[i], i, only * merged[i]) for i, ids in enumerate(whole)]


def _expanded(
    chats: list[Chat], rows: list[dict[str, Any]], encoder: TextEncoder, firsts: list[int]
) -> list[EncodedRow]:
    return [
        EncodedRow(*target, i)
        for i, (chat, row) in enumerate(zip(chats, rows, strict=True))
        for target in expanded_turns(encoder, chat, template_options(row), firsts[i])
    ]


def rendered_answers(
    prompts: Sequence[Chat],
    answers: Sequence[Chat],
    options: Sequence[Mapping[str, Any]],
    encoder: TextEncoder,
) -> tuple[list[str], list[Ids], list[int], list[int]]:
    """Render and encode prompts of messages with their answers.

    Returns:
        Texts and ids of prompt and answer, the token with which each answer begins, and 1 where
        the prompt alone ends with other tokens.
    """
    chats = list(map(add, prompts, answers))
    texts = encoder.render_all(chats, options)
    heads = encoder.render_all(prompts, list(map(_with_ending, prompts, options)))
    # A template may render the end of a prompt differently once something follows it.
    tails = [text[len(head) :] for head, text in zip(heads, texts, strict=True)]
    head_ids = encoder.ids(heads)
    whole, _ = encoder.continued(heads, head_ids, tails)
    others = [i for i, head in enumerate(heads) if not texts[i].startswith(head)]
    for i, ids in zip(others, encoder.ids([texts[i] for i in others]), strict=True):
        whole[i] = ids
    starts = list(map(common_prefix_length, head_ids, whole))
    return texts, whole, starts, [int(s < len(h)) for s, h in zip(starts, head_ids, strict=True)]


def _with_ending(prompt: Chat, options: Mapping[str, Any]) -> dict[str, Any]:
    goes_on = bool(prompt) and prompt[-1]["role"] == "assistant"
    return {**options, "continue_final_message" if goes_on else "add_generation_prompt": True}


def _conversations(
    rows: list[dict[str, Any]], encoder: TextEncoder, options: SupervisedOptions
) -> list[EncodedRow]:
    chats = [as_messages(row["messages" if "messages" in row else "conversations"]) for row in rows]
    if not all(chats):
        raise ValueError("a conversation has no messages.")
    if options.expand_turns:
        return _expanded(chats, rows, encoder, [0] * len(rows))
    if options.assistant_only_loss:
        return _assistant_turns(chats, rows, encoder)
    texts = encoder.render_all(chats, list(map(template_options, rows)))
    found = encoder.ids(texts)
    trained = list(map(_from, repeat(0), map(len, found)))
    leave_added_thinking(encoder, texts, chats, trained)
    return [EncodedRow(ids, trained[i], i) for i, ids in enumerate(found)]


def _assistant_turns(
    chats: list[Chat], rows: list[dict[str, Any]], encoder: TextEncoder
) -> list[EncodedRow]:
    texts, spans = assistant_spans(encoder, chats, list(map(template_options, rows)))
    found = encoder.encodings(texts)
    pairs = zip(found, map(trained_tokens, found, spans), strict=True)
    return [
        EncodedRow(one.ids, trained, i, merged) for i, (one, (trained, merged)) in enumerate(pairs)
    ]


def _tokenized(
    rows: list[dict[str, Any]], encoder: TextEncoder, options: SupervisedOptions
) -> list[EncodedRow]:
    return [
        EncodedRow(list(map(int, row["input_ids"])), _given_mask(row, options), i)
        for i, row in enumerate(rows)
    ]


def _given_mask(row: Mapping[str, Any], options: SupervisedOptions) -> np.ndarray:
    """Which tokens of a tokenized example are trained on, (tokens,) bool."""
    ids = np.asarray(row["input_ids"])
    names = ["labels", "assistant_masks", *["completion_mask"] * (not options.trains_prompts)]
    trained = np.ones(len(ids), dtype=bool)
    for name in (name for name in names if row.get(name) is not None):
        values = np.asarray(row[name])
        if len(values) != len(ids):
            raise ValueError(
                f"{name} has length {len(values)}, and input_ids has length {len(ids)}."
            )
        trained &= (values != IGNORED) if name == "labels" else values.astype(bool)
        if name == "labels" and (values != ids)[trained].any():
            raise ValueError(
                "labels must be the tokens of input_ids at their own places, or -100; "
                "they are shifted when the loss is computed."
            )
    return trained
