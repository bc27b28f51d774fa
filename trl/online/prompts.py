"""From dataset rows to token ids, and from completions back to what reward functions read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..data.formats import is_conversational
from ..data.responses import as_message
from ..types import Prompts


class PromptEncoder:
    """Tokenizes prompts, each distinct one once.

    Args:
        tokenizer: the policy's tokenizer.
        template_kwargs (`dict`, *optional*): extra arguments of every chat-template call.
        context (`int`, *optional*): most tokens the model can see.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: dict[str, Any] | None = None,
        context: int | None = None,
    ):
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs or {}
        self._context = context

    def __call__(self, rows: Sequence[dict[str, Any]]) -> Prompts:
        """Encode the `prompt` of each row; repeated rows share one list of ids.

        Raises:
            KeyError: if a row has no `prompt`.
            ValueError: if a prompt has no tokens, or leaves no room for a completion; the message
                names the row.
        """
        known: dict[str, list[int]] = {}
        token_ids = []
        for place, row in enumerate(rows):
            if "prompt" not in row:
                raise KeyError(f"Row {place} has no 'prompt' column; it has {sorted(row)}.")
            key = repr((row["prompt"], row.get("chat_template_kwargs")))
            if key not in known:
                known[key] = self._checked(place, row)
            token_ids.append(known[key])
        return Prompts(messages=[row["prompt"] for row in rows], token_ids=token_ids)

    def completions(self, prompts: Prompts, completion_ids: Sequence[Sequence[int]]) -> list[Any]:
        """Decode completions into the format of their prompts: strings, or lists of messages.

        A tokenizer with a `response_template` parses messages: reasoning and tool calls are then
        apart from the content.
        """
        tokenizer = self._tokenizer
        return [
            tokenizer.decode(list(ids), skip_special_tokens=True)
            if isinstance(message, str)
            else [as_message(tokenizer, prompt, ids)]
            for message, prompt, ids in zip(
                prompts.messages, prompts.token_ids, completion_ids, strict=True
            )
        ]

    def _checked(self, place: int, row: dict[str, Any]) -> list[int]:
        ids = self._encode(row)
        shown = repr(row["prompt"])[:80]
        if not ids:
            raise ValueError(f"The prompt of row {place} ({shown}) has no tokens.")
        if self._context is not None and len(ids) >= self._context:
            raise ValueError(
                f"The prompt of row {place} ({shown}) has {len(ids)} tokens, but the model sees "
                f"only {self._context} with the completion; remove or shorten such prompts."
            )
        return ids

    def _encode(self, row: dict[str, Any]) -> list[int]:
        prompt = row["prompt"]
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt)["input_ids"])
        if not is_conversational({"prompt": prompt}):
            raise ValueError(
                f"A prompt must be a string or a list of messages with 'role' and 'content', not "
                f"{prompt!r:.80}."
            )
        continues = prompt[-1]["role"] == "assistant"
        return self._tokenizer.apply_chat_template(
            prompt,
            tokenize=True,
            return_dict=True,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **(self._template_kwargs | (row.get("chat_template_kwargs") or {})),
        )["input_ids"]
