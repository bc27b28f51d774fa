"""Rewards for the form of a completion."""

from __future__ import annotations

import re
from typing import Any

THINK = re.compile(r"<think>(?!.*<think>).*?</think>.*", re.DOTALL)


def text_of(completion: Any) -> str:
    """The text of a completion: a string, or the content of its first message."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def think_format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """1.0 for a completion that begins with one `<think>` block and closes it, else 0.0."""
    return [float(THINK.fullmatch(text_of(completion)) is not None) for completion in completions]
