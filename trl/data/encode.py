"""Texts and conversations as token ids, a batch at a time."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils.chat_template_utils import render_jinja_template

from .formats import prepare_multimodal_messages
from .preference import common_prefix_length
from .templates import has_generation_markers

Ids = list[int]
Message = dict[str, Any]
Chat = Sequence[Message]
# Characters of a prompt's end that are encoded again with each answer, and of these, tokens that
# must come out as they stand in the whole prompt.
TAIL, AGREEING = 32, 4
PROBED = 32  # rows on which a tokenizer shows that ends of prompts can stand for whole ones


class TextEncoder:
    """Turns strings and conversations into token ids.

    Args:
        processing_class: a tokenizer, or a processor with one; texts alone are encoded.

    Attributes:
        tokenizer: the tokenizer.
        begin (`list[int]`): what the tokenizer puts before a plain text, such as BOS.
    """

    def __init__(self, processing_class: PreTrainedTokenizerBase | ProcessorMixin):
        self.tokenizer = getattr(processing_class, "tokenizer", processing_class)
        self._is_processor = self.tokenizer is not processing_class
        self._template = processing_class.chat_template if self._is_processor else None
        self._core = self.tokenizer.backend_tokenizer if self.tokenizer.is_fast else None
        # Without words, a character may change tokens far before it.
        self._local = None if self._core is not None and self._core.pre_tokenizer else False
        self.begin = self._begin()

    def _begin(self) -> Ids:
        full = self.tokenizer("a")["input_ids"]
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        places = range(len(full) - len(bare) + 1)
        at = next((i for i in places if full[i : i + len(bare)] == bare), 0)
        return list(full[:at])

    @cached_property
    def eos(self) -> int:
        """The token that ends a plain text.

        Raises:
            ValueError: if the tokenizer has none.
        """
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
        return [one.ids for one in self._encodings(self._core.encode_batch_fast, texts)]

    def encodings(self, texts: Sequence[str]) -> list[Any]:
        """Encode texts as they are, with the characters that each token stands for.

        Raises:
            ValueError: if the tokenizer is a slow one, which does not know.
        """
        if self._core is None:
            raise ValueError(
                "The turns of the assistant cannot be found in tokens: the tokenizer is not a "
                "fast one. Use prompt-completion data, or a fast tokenizer."
            )
        return self._encodings(self._core.encode_batch, texts)

    def _encodings(self, encode: Any, texts: Sequence[str]) -> list[Any]:
        # Calls of the tokenizer leave their settings behind.
        core = self.tokenizer.backend_tokenizer
        core.no_truncation()
        core.no_padding()
        return encode(list(texts), add_special_tokens=False)

    def begun(self, ids: Ids) -> Ids:
        """Put BOS before a plain text, unless it stands there."""
        return ids if ids[: len(self.begin)] == self.begin else self.begin + ids

    def ended(self, ids: Ids) -> Ids:
        """Put EOS behind a plain text, in place, unless it stands there."""
        if not ids or ids[-1] != self.eos:
            ids.append(self.eos)
        return ids

    def continued(
        self, prompts: Sequence[str], prompt_ids: Sequence[Ids], answers: Sequence[str]
    ) -> tuple[list[Ids], list[int]]:
        """Encode prompts together with their answers.

        The end of each prompt is encoded again with the answer, and the rest taken over from its
        ids, where the tokenizer allows it; otherwise the whole.

        Returns:
            The ids of prompt + answer, and how many of them are those of the prompt alone. That
            is less than the prompt has where tokens merge over the boundary.
        """
        found: list[Ids | None] = [None] * len(prompts)
        if self._local is not False:
            found = self._joined_at_tails(prompts, prompt_ids, answers)
        if self._local is None:
            self._local = self._agrees(found[:PROBED], prompts, answers)
            found = found if self._local else [None] * len(found)
        rest = [i for i, ids in enumerate(found) if ids is None]
        whole = self.ids([prompts[i] + answers[i] for i in rest])
        for i, ids in zip(rest, whole, strict=True):
            found[i] = ids
        done = [ids for ids in found if ids is not None]
        return done, list(map(common_prefix_length, prompt_ids, done))

    def _agrees(
        self, found: Sequence[Ids | None], prompts: Sequence[str], answers: Sequence[str]
    ) -> bool:
        whole = self.ids([p + a for p, a in zip(prompts[:PROBED], answers, strict=False)])
        return all(a is None or a == b for a, b in zip(found, whole, strict=True))

    def _joined_at_tails(
        self, prompts: Sequence[str], prompt_ids: Sequence[Ids], answers: Sequence[str]
    ) -> list[Ids | None]:
        # A tail begins with a space, so with a word.
        starts = [max(0, prompt.rfind(" ", 0, max(0, len(prompt) - TAIL))) for prompt in prompts]
        tails = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
        once = list(dict.fromkeys(tails))
        alone = dict(zip(once, self.ids(once), strict=True))
        joint = self.ids([tail + answer for tail, answer in zip(tails, answers, strict=True)])
        return [
            new if start == 0 else _joined(old, alone[tail], new)
            for start, old, tail, new in zip(starts, prompt_ids, tails, joint, strict=True)
        ]

    def render_all(
        self, chats: Sequence[Chat], options: Sequence[Mapping[str, Any]], **ending: Any
    ) -> list[str]:
        """Render conversations with the chat template.

        `options` are tools and further arguments of each; `ending` is `add_generation_prompt` or
        `continue_final_message`.
        """
        found: list[str] = []
        for same, prepared in self._alike(chats, options):
            given = {"chat_template": self._template, **same, **ending}
            found += self.tokenizer.apply_chat_template(prepared, tokenize=False, **given)
        return found

    def marks_turns(self, options: Mapping[str, Any]) -> bool:
        """Whether the chat template has markers around what the assistant writes."""
        return has_generation_markers(self._chosen_template(options))

    def render_marked(
        self, chats: Sequence[Chat], options: Sequence[Mapping[str, Any]]
    ) -> tuple[list[str], list[list[tuple[int, int]]]]:
        """Render conversations, with the characters (start, stop) inside generation markers."""
        texts: list[str] = []
        spans: list[list[tuple[int, int]]] = []
        for same, prepared in self._alike(chats, options):
            found, marked = render_jinja_template(
                [[{k: v for k, v in m.items() if v is not None} for m in c] for c in prepared],
                chat_template=self._chosen_template(same),
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map | dict(same),
            )
            texts, spans = texts + found, spans + marked
        return texts, spans

    def _alike(
        self, chats: Sequence[Chat], options: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[Mapping[str, Any], list[Chat]]]:
        """Conversations with equal options: rendered in one call, they are rendered much faster."""
        prepare: Any = prepare_multimodal_messages if self._is_processor else list
        for same, rows in groupby(zip(chats, options, strict=True), key=itemgetter(1)):
            yield same, [prepare(chat) for chat, _ in rows]

    def _chosen_template(self, options: Mapping[str, Any]) -> str:
        return self.tokenizer.get_chat_template(self._template, options.get("tools"))


def _joined(prompt: Ids, tail: Ids, joint: Ids) -> Ids | None:
    """The prompt's tokens, then those of tail and answer from where the two agree; or None."""
    agreeing = common_prefix_length(prompt[-len(tail) :][::-1], tail[::-1])
    kept = common_prefix_length(tail, joint)
    if kept - (len(tail) - agreeing) < AGREEING:
        return None
    return prompt[: len(prompt) - len(tail) + kept] + joint[kept:]


def template_options(row: Mapping[str, Any]) -> dict[str, Any]:
    """Read a row's tools (a list, or JSON) and `chat_template_kwargs`; None means none."""
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    kwargs = row.get("chat_template_kwargs")
    kwargs = json.loads(kwargs) if isinstance(kwargs, str) else kwargs
    return {"tools": tools or None} | {k: v for k, v in (kwargs or {}).items() if v is not None}
