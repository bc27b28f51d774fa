"""Conversational and plain examples: telling them apart, converting, rendering, pairing them."""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, TypeVar

from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ..ops.masking import common_prefix_length

D = TypeVar("D", Dataset, DatasetDict)
Processor: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin
Row = dict[str, Any]
FIELDS = ("prompt", "chosen", "rejected", "completion", "messages")
# Sets of fields, as they are named in a message.
SUPPORTED = (
    "messages; prompt; completion, prompt; chosen, prompt, rejected; chosen, rejected; "
    "completion, label, prompt"
)
# Where an image block may keep its image; datasets fill absent keys with None.
IMAGE_KEYS = ("image", "url", "path", "base64")
# What no trainer reads yet: parts of contents whose type has such a word in it, and columns.
MEDIA = ("image", "audio", "video")
MEDIA_COLUMNS = ("image", "images")
SPOKEN = ("content", "tool_calls", "reasoning_content")  # a message has one of them


def is_conversational(example: Row) -> bool:
    """Whether the first text of an example that is not empty is a list of messages with roles."""
    for field in FIELDS:
        if value := example.get(field):
            return isinstance(value, list) and isinstance(value[0], dict) and "role" in value[0]
    return False


def is_conversational_from_value(example: Row) -> bool:
    """Whether `conversations` is a list of turns with `from` and `value`."""
    turns = example.get("conversations")
    first = turns[0] if isinstance(turns, list) and turns else None
    return isinstance(first, dict) and {"from", "value"} <= first.keys()


def maybe_convert_to_chatml(example: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Rename `from`, `value` and `conversations` of a row to `role`, `content` and `messages`."""
    renamed = dict(example)
    for column in (*FIELDS, "conversations"):
        if isinstance(renamed.get(column), list):
            renamed[column] = [_turn(turn) for turn in renamed[column]]
    if "conversations" in renamed:
        renamed["messages"] = renamed.pop("conversations")
    return renamed


def _turn(turn: object) -> object:
    if not isinstance(turn, dict) or not {"from", "value"} & turn.keys():
        return turn
    names = {"from": "role", "value": "content"}
    return {names.get(key, key): value for key, value in turn.items()}


def apply_chat_template(
    example: Row, processing_class: Processor, tools: list | None = None, **template_kwargs: Any
) -> Row:
    """Render a conversational example as strings.

    Its fields are one of the sets of `SUPPORTED`, else it is a KeyError; more of them are dropped.
    A `chat_template_kwargs` field is merged into `template_kwargs`, further arguments of the
    template. Messages become `text`, other fields strings; a completion is what its rendered
    conversation has beyond the rendered prompt. ValueError: a prompt has no messages, or its last
    one has a role that cannot end a prompt.
    """
    fields = sorted(name for name in (*FIELDS, "label") if name in example)
    if ", ".join(fields) not in SUPPORTED.split("; "):
        raise KeyError(f"An example has the fields {sorted(example)}; supported are: {SUPPORTED}.")
    options = {"tools": tools or None, "tokenize": False}
    options |= template_kwargs | (example.get("chat_template_kwargs") or {})
    render = partial(processing_class.apply_chat_template, **options)
    if "messages" in example:
        return {"text": render(example["messages"])}
    if "prompt" not in example:
        return {name: render(example[name]) for name in ("chosen", "rejected")}
    return _render_answers(example, render)


def _render_answers(example: Row, render: Callable[..., str]) -> Row:
    prompt = example["prompt"]
    if not prompt:
        raise ValueError("A prompt has no messages; it must end with user, tool or assistant.")
    if (role := prompt[-1]["role"]) not in ("user", "tool", "assistant"):
        raise ValueError(
            f"A prompt ends with a message of role {role!r}; it must be user, tool or assistant."
        )
    answers = [name for name in ("completion", "chosen", "rejected") if name in example]
    whole = {name: render(prompt + example[name]) for name in answers}
    # A template may render the end of a prompt differently once something follows it.
    texts = [render(prompt, **prompt_ending(prompt)), *whole.values()]
    shared = os.path.commonprefix(texts)  # noqa: RUF071 (no paths)
    rendered = {"prompt": shared} | {name: text[len(shared) :] for name, text in whole.items()}
    return rendered | ({"label": example["label"]} if "label" in example else {})


def prompt_ending(prompt: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """How a template ends a prompt: before an answer, or within it if the assistant goes on."""
    goes_on = bool(prompt) and prompt[-1]["role"] == "assistant"
    return {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}


def maybe_apply_chat_template(
    example: Row, processing_class: Processor, tools: list | None = None, **template_kwargs: Any
) -> Row:
    """`apply_chat_template` for conversational examples; others are returned unchanged."""
    if not is_conversational(example):
        return example
    return apply_chat_template(example, processing_class, tools, **template_kwargs)


def prepare_multimodal_messages(messages: list[Row], images: list[Any] | None = None) -> list[Row]:
    """Turn string contents into blocks and put images where they belong, in a copy of messages.

    Images fill the empty image blocks in order; without such blocks they stand before the text of
    the first user message. ValueError: a role is unknown, or images and blocks differ in number.
    """
    images = list(images or [])
    prepared = [_with_blocks(message) for message in messages]
    blocks = list(chain(*map(_empty_image_blocks, prepared)))
    users = (message for message in prepared if message["role"] == "user")
    first = next((message for message in users if message.get("content")), None)
    if not blocks and first is not None:
        blocks = [{"type": "image"} for _ in images]
        first["content"] = [*blocks, *first["content"]]
    if len(blocks) != len(images):
        raise ValueError(f"{len(images)} images were given for {len(blocks)} image blocks.")
    for block, image in zip(blocks, images, strict=True):
        block["image"] = image
    return prepared


def _empty_image_blocks(message: Row) -> list[Row]:
    blocks = [] if message["role"] == "tool" else message.get("content") or []
    images = [block for block in blocks if block.get("type") == "image"]
    return [block for block in images if all(block.get(key) is None for key in IMAGE_KEYS)]


def _with_blocks(message: Row) -> Row:
    if message["role"] not in ("system", "user", "assistant", "tool"):
        raise ValueError(
            f"Unknown role {message['role']!r}; it must be system, user, assistant or tool."
        )
    content = message.get("content")
    if isinstance(content, str):
        return message | {"content": [{"type": "text", "text": content}]}
    if isinstance(content, list):
        return message | {"content": [dict(block) for block in content]}
    return dict(message)


def malformed_prompt(prompt: Any, column: str = "prompt") -> str | None:
    """Say what is wrong with the form of a prompt, or other conversation, if something is."""
    if isinstance(prompt, str):
        return None
    if prompt is None or prompt == []:
        advice = f"Remove such rows, for example with dataset.filter(lambda row: row[{column!r}])."
        return f"{'is missing' if prompt is None else 'has no messages'}. {advice}"
    if not is_conversational({"prompt": prompt}):
        return "must be a string or a list of messages with 'role' and 'content'."
    problems = ((place, malformed_message(message)) for place, message in enumerate(prompt))
    first = next(((place, problem) for place, problem in problems if problem), None)
    return f"has {first[1]} in message {first[0]}." if first else None


def malformed_message(message: object) -> str | None:
    """Say what is wrong with a message, if something is: no role, nothing in it, or an image."""
    if not isinstance(message, dict):
        return f"{message!r:.40} instead of 'role' and 'content'"
    if not message.get("role"):
        return "no 'role'"
    if all(message.get(name) is None for name in SPOKEN):
        return "no 'content'"
    return unavailable_part(message)


def unavailable_part(message: Row) -> str | None:
    """Name the part of a message's content that no trainer can read yet, if there is one.

    With `MEDIA_COLUMNS`, this is what has to change for images.
    """
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        part_type = part.get("type") if isinstance(part, dict) else None
        if isinstance(part_type, str) and any(media in part_type for media in MEDIA):
            return f"{part_type!r} content, which is not available in this release,"
    return None


def text_of_parts(content: object) -> Any:
    """Join the parts of a content that has text parts alone; return any other as it is."""
    if not isinstance(content, list):
        return content
    texts = [_text_of_part(part) for part in content]
    return content if None in texts else "".join(filter(None, texts))


def _text_of_part(part: object) -> str | None:
    if not isinstance(part, dict) or part.get("type", "text") != "text":
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None


def refuse_media_columns(name: str, columns: Iterable[str]) -> None:
    """Raise a NotImplementedError if columns of the dataset of this name have images."""
    if images := sorted(set(MEDIA_COLUMNS) & set(columns)):
        raise NotImplementedError(
            f"{name} has the column {images[0]!r}: images are not available in this release. "
            "Remove the column to train on text."
        )


def extract_prompt(example: Row) -> Row:
    """Split off what `chosen` and `rejected`, strings or messages, have in common as `prompt`.

    A space at the end of a common string belongs to the completions. If one is the beginning of
    the other, its last element stays a completion, so that none is empty.
    """
    chosen, rejected = example["chosen"], example["rejected"]
    shared = common_prefix_length(chosen, rejected)
    if shared and shared == min(len(chosen), len(rejected)):
        shared -= 1
    if isinstance(chosen, str) and shared and chosen[shared - 1] == " ":
        shared -= 1
    return {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def maybe_extract_prompt(example: Row) -> Row:
    """`extract_prompt` for pairs without a prompt of their format; others are unchanged."""
    if "chosen" not in example or "rejected" not in example:
        return example
    prompt = example.get("prompt")
    is_text = isinstance(example["chosen"], str)
    has_prompt = prompt is not None and isinstance(prompt, str) == is_text
    return example if has_prompt else extract_prompt(example)


def unpair_preference_dataset(dataset: D, **map_kwargs: Any) -> D:
    """Turn each pair into two rows with a completion and a label; other columns are kept.

    Of each batch the chosen rows come first (`label` True), then the rejected ones. `map_kwargs`
    are arguments of `Dataset.map`.
    """

    def unpair(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        count = len(batch["chosen"])
        answers = ("chosen", "rejected")
        rest = {name: values * 2 for name, values in batch.items() if name not in answers}
        return rest | {
            "completion": batch["chosen"] + batch["rejected"],
            "label": [True] * count + [False] * count,
        }

    return dataset.map(unpair, batched=True, remove_columns=["chosen", "rejected"], **map_kwargs)


def maybe_unpair_preference_dataset(
    dataset: D, num_proc: int | None = None, desc: str | None = None
) -> D:
    """`unpair_preference_dataset` for datasets with both columns; others are unchanged."""
    split = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
    # A stream may know its columns only from its rows.
    if not {"chosen", "rejected"} <= set(split.column_names or next(iter(split), ())):
        return dataset
    options = {"num_proc": num_proc, "desc": desc}
    chosen = {name: value for name, value in options.items() if value is not None}
    return unpair_preference_dataset(dataset, **chosen)
