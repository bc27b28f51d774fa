"""Where the assistant speaks in a rendered conversation."""

import re
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from .encode import Chat, Span, TextEncoder
from .formats import common_prefix_length
from .templates import has_generation_markers

Options = Mapping[str, Any]
STAND_IN = "\u2042STAND\u2042IN\u2042"
EMPTY_THINKING = re.compile(r"<think>\s*</think>\s*")


def assistant_spans(
    encoder: TextEncoder, chats: Sequence[Chat], options: Sequence[Options]
) -> tuple[list[str], list[list[Span]]]:
    """Render conversations and find the characters that the assistant writes in them.

    A turn ends with its end-of-turn token; white space the template puts behind it, and an empty
    thinking block that no message has, are not the assistant's. Turns (start, stop) are found by
    the template's generation markers, or by rendering again without and with them. ValueError:
    neither is exact for this template.
    """
    if all(has_generation_markers(encoder.chosen_template(one)) for one, _ in groupby(options)):
        texts, found = encoder.render_marked(chats, options)
    else:
        texts = encoder.render_all(chats, options)
        found = [
            [_turn(encoder, chat, option, k, text) for k in _said(chat)]
            for chat, option, text in zip(chats, options, texts, strict=True)
        ]
    return texts, list(map(without_added_thinking, texts, chats, found))


def _said(chat: Chat, first: int = 0) -> list[int]:
    return [k for k in range(first, len(chat)) if chat[k]["role"] == "assistant"]


def _turn(encoder: TextEncoder, messages: Chat, options: Options, k: int, text: str) -> Span:
    head = _attempt(encoder, messages[:k], options, add_generation_prompt=True)
    last = k + 1 == len(messages)
    through = text if last else _attempt(encoder, messages[: k + 1], options)
    start, stop = _length_of_beginning(text, head), _length_of_beginning(text, through)
    if start is None or stop is None:
        # The turn's content replaced shows what the template writes around it.
        stand_in = {"role": "assistant", "content": STAND_IN}
        other = _attempt(encoder, [*messages[:k], stand_in, *messages[k + 1 :]], options)
        before, _, behind = other.partition(STAND_IN)
        start = _length_of_beginning(text, before) if start is None else start
        stop = _end_before(encoder, text, behind) if stop is None else stop
    if start is None or stop is None:
        what, found = ("beginning", head) if start is None else ("end", through)
        at = common_prefix_length(found, text)
        raise ValueError(
            f"The chat template has no generation markers, and the {what} of message {k} cannot be "
            f"found by rendering the conversation again: {found[at : at + 40]!r} stands where the "
            f"whole conversation has {text[at : at + 40]!r}. Use a template with generation "
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
    found = list(spans)
    for block in EMPTY_THINKING.finditer(text):
        if not text.startswith(followed, block.end()):
            first, behind = block.span()
            sides = ([(a, min(b, first)), (max(a, behind), b)] for a, b in found)
            found = [(a, b) for a, b in chain(*sides) if a < b]
    return [(start, stop) for start, stop in found if text[start:stop].strip()]


def expanded_turns(
    encoder: TextEncoder, messages: Chat, options: Options, first: int = 0
) -> list[tuple[str, list[Span]]]:
    """Make one target for each turn of the assistant, in the context it has when it is written.

    Messages before `first` are no targets. Returns the text of each target, and the characters to
    train on. A target that the next one continues unchanged is part of that one, so a template that
    keeps all turns gives one row.
    """
    targets: list[tuple[str, list[Span]]] = []
    for k in _said(messages, first):
        chat = messages[: k + 1]
        text = encoder.render_all([chat], [options])[0]
        turn = _turn(encoder, chat, options, k, text)
        text, spans = text[: turn[1]], without_added_thinking(text, chat[-1:], [turn])
        if targets and text.startswith(targets[-1][0]):
            spans = targets.pop()[1] + spans
        targets.append((text, spans))
    return targets
