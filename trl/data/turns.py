"""Where the assistant speaks in a rendered conversation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .encode import Ids, Message, TextEncoder
from .preference import common_prefix_length

Span = tuple[int, int]
STAND_IN = "\u2042STAND\u2042IN\u2042"
EMPTY_THINKING = re.compile(r"\s*<think>\s*</think>\s*")


def assistant_spans(
    encoder: TextEncoder, messages: Sequence[Message], options: Mapping[str, Any]
) -> tuple[str, list[Span]]:
    """Render a conversation and find the characters that the assistant writes in it.

    A turn ends with its end-of-turn token; white space the template puts behind it, and an empty
    thinking block that the message does not have, are not the assistant's.

    Args:
        encoder: knows the chat template.
        messages: the conversation.
        options: tools and further arguments of the template.

    Returns:
        The text, and (start, stop) of each turn: by the template's generation markers, or by
        rendering again without and with the turn.

    Raises:
        ValueError: if neither is exact for this template.
    """
    if encoder.marks_turns(options):
        text, spans = encoder.render_marked(messages, options)
    else:
        text = encoder.render(messages, options)
        turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [_turn(encoder, messages, options, k, text) for k in turns]
    said = [m for m in messages if m["role"] == "assistant"]
    if len(said) == len(spans):
        spans = [_without_thinking(text, span, m) for span, m in zip(spans, said, strict=True)]
    return text, spans


def _turn(
    encoder: TextEncoder, messages: Sequence[Message], options: Mapping[str, Any], k: int, text: str
) -> Span:
    head = _attempt(encoder, messages[:k], options, add_generation_prompt=True)
    last = k + 1 == len(messages)
    through = text if last else _attempt(encoder, messages[: k + 1], options)
    start, stop = _length_of_beginning(text, head), _length_of_beginning(text, through)
    if start is None or stop is None:
        # The turn's content replaced shows what the template writes around it.
        stand_in = {"role": "assistant", "content": STAND_IN}
        other = _attempt(encoder, [*messages[:k], stand_in, *messages[k + 1 :]], options) or ""
        before, _, behind = other.partition(STAND_IN)
        start = _length_of_beginning(text, before) if start is None else start
        stop = _end_before(encoder, text, behind) if stop is None else stop
    if start is None or stop is None:
        what = ("beginning", head) if start is None else ("end", through)
        raise ValueError(_inexact(k, *what, text))
    return start, stop - _space_behind_end(encoder, text[start:stop])


def _space_behind_end(encoder: TextEncoder, turn: str) -> int:
    ended = re.search(rf"{encoder.special}(\s*)\Z", turn)
    return len(ended[1]) if ended else 0


def _length_of_beginning(text: str, beginning: str | None) -> int | None:
    return len(beginning) if beginning and text.startswith(beginning) else None


def _end_before(encoder: TextEncoder, text: str, behind: str) -> int | None:
    """Where a turn is over if `behind` follows its content: behind the first special token."""
    if not behind or not text.endswith(behind):
        return None
    special = re.match(rf"\s*{encoder.special}", behind)
    return len(text) - len(behind) + (special.end() if special else 0)


def _attempt(
    encoder: TextEncoder, messages: Sequence[Message], options: Mapping[str, Any], **ending: Any
) -> str | None:
    try:
        return encoder.render(messages, options, **ending)
    except Exception:  # a template refuses a part of a conversation by any error of its own
        return None


def _without_thinking(text: str, span: Span, message: Message) -> Span:
    empty = EMPTY_THINKING.match(text, *span)
    if empty is None or EMPTY_THINKING.match(str(message.get("content"))):
        return span
    return empty.end(), span[1]


def _inexact(k: int, what: str, found: str | None, text: str) -> str:
    found = found or ""
    at = common_prefix_length(found, text)
    return (
        f"The chat template has no generation markers, and the {what} of message {k} cannot be "
        f"found by rendering the conversation again: {found[at : at + 40]!r} stands where the "
        f"whole conversation has {text[at : at + 40]!r}. Use a template with generation markers, "
        "prompt-completion data, or expand_turns=True."
    )


def tokens_of(places: np.ndarray, spans: Sequence[Span]) -> tuple[list[int], int]:
    """Find the tokens that stand for characters of the spans.

    Args:
        places: (tokens, 2) characters of each token.
        spans: characters (start, stop).

    Returns:
        Token spans, flat: start, stop, start, stop, ...; and the number of tokens that stand
        for characters before a span as well, which count as part of it.
    """
    found: list[int] = []
    merged = 0
    for start, stop in spans:
        inside = np.flatnonzero((places[:, 0] < stop) & (places[:, 1] > start))
        if len(inside):
            merged += bool(places[inside[0], 0] < start)
            found += [int(inside[0]), int(inside[-1]) + 1]
    return found, merged


def expanded_turns(
    encoder: TextEncoder, messages: Sequence[Message], options: Mapping[str, Any], first: int = 0
) -> list[tuple[Ids, list[int]]]:
    """Make one target for each turn of the assistant, in the context it has when it is written.

    Args:
        encoder, messages, options: as for `assistant_spans`.
        first (`int`): earlier messages are no targets.

    Returns:
        Ids and trained token spans, flat, of each target. A target that the next one continues
        unchanged is part of that one, so a template that keeps all turns gives one row.

    Raises:
        ValueError: as `assistant_spans`.
    """
    targets: list[tuple[Ids, list[int]]] = []
    for k in range(first, len(messages)):
        if messages[k]["role"] != "assistant":
            continue
        text, spans = _last_turn(encoder, messages[: k + 1], options)
        ids, places = encoder.ids_and_places([text])
        found, _ = tokens_of(places[0], spans)
        if targets and ids[0][: len(targets[-1][0])] == targets[-1][0]:
            found = targets.pop()[1] + found
        targets.append((ids[0], found))
    return targets


def _last_turn(
    encoder: TextEncoder, messages: Sequence[Message], options: Mapping[str, Any]
) -> tuple[str, list[Span]]:
    text = encoder.render(messages, options)
    span = _turn(encoder, messages, options, len(messages) - 1, text)
    start, stop = _without_thinking(text, span, messages[-1])
    return text[:stop], [(start, stop)]
