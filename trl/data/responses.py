"""What the policy wrote, read as a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase


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
    content = tokenizer.decode(list(ids), skip_special_tokens=True)
    return {"role": "assistant", "content": content}
