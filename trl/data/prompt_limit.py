"""What a prompt must be: of which form, and how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .formats import is_conversational

SAYS_SOMETHING = ("content", "tool_calls", "reasoning_content")


@dataclass(frozen=True)
class PromptLimit:
    """How long a prompt may be, and what becomes of a longer one."""

    tokens: int | None = None  # None: no limit
    reason: str = ""  # where that number comes from, for messages
    action: str = "error"  # or "drop", or "cut-left", which keeps the end of the prompt

    @classmethod
    def of(
        cls, longest: int | None, action: str, context: int | None, completion: int
    ) -> PromptLimit:
        """Settle the limit of a run.

        Args:
            longest (`int`, *optional*): `max_prompt_length`.
            action (`str`): `long_prompts`.
            context (`int`, *optional*): most tokens the model sees.
            completion (`int`): `max_completion_length`. If there is no `longest`, prompts are
                dropped or cut so that a whole completion has room; an error needs less reason.
        """
        if longest is not None and (context is None or longest < context):
            return cls(longest, f"max_prompt_length={longest}", action)
        if context is None:
            return cls(action=action)
        room = 1 if action == "error" or longest is not None else completion
        reason = f"the model sees {context} tokens of prompt and completion together"
        return cls(context - room, reason, action)

    def is_broken_by(self, ids: Sequence[int]) -> bool:
        """Whether a prompt is too long."""
        return self.tokens is not None and len(ids) > self.tokens

    def problem(self, ids: Sequence[int]) -> str | None:
        """Say what is wrong with a prompt, if the run cannot go on with it."""
        if not ids:
            return "has no tokens. Remove such rows from the dataset."
        if self.action != "error" or not self.is_broken_by(ids):
            return None
        return (
            f"has {len(ids)} tokens; at most {self.tokens} are possible ({self.reason}). Shorten "
            "such prompts, or set long_prompts to 'drop' or 'cut-left'."
        )

    def cut(self, ids: list[int]) -> list[int]:
        """Keep the end of a prompt that is too long."""
        return ids[-self.tokens :] if self.tokens and self.action == "cut-left" else ids


def malformed_prompt(prompt: Any) -> str | None:
    """Say what is wrong with the form of a prompt, if something is."""
    if isinstance(prompt, str):
        return None
    if prompt is None or prompt == []:
        absent = "is missing" if prompt is None else "has no messages"
        advice = "for example with dataset.filter(lambda row: row['prompt'])"
        return f"{absent}. Remove such rows, {advice}."
    if not is_conversational({"prompt": prompt}):
        return "must be a string or a list of messages with 'role' and 'content'."
    for place, message in enumerate(prompt):
        if not message.get("role"):
            return f"has no 'role' in message {place}."
        if all(message.get(name) is None for name in SAYS_SOMETHING):
            return f"has no 'content' in message {place}."
    return None
