"""Prompts and answers in one form: both text or both messages, with the prompt standing once."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers.utils import logging

from ..ops.masking import common_prefix_length
from .formats import Row, malformed_prompt, maybe_convert_to_chatml, text_of_parts

logger = logging.get_logger(__name__)

Chat = list[Row]
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
QUESTIONS = ("instruction", "input", "question", "query")
ANSWERS = ("output", "response", "answer")
# Characters of a prompt that an answer hardly repeats by chance.
NOTICEABLE = 10


def as_messages(messages: Any, column: str = "messages") -> Chat:
    """Read turns with from and value, or role and content, under the roles of chat templates.

    `column` is the name of the messages in errors: a TypeError for text, a ValueError for messages
    that cannot be used.
    """
    if isinstance(messages, str):
        raise TypeError(f"{column!r} must be a list of messages, not the string {messages!r:.80}.")
    if messages is None:
        raise ValueError(f"{column!r} {malformed_prompt(None, column)}")
    turns: Chat = maybe_convert_to_chatml({"messages": list(messages)})["messages"]
    if turns and (problem := malformed_prompt(turns, column)):
        raise ValueError(f"{column!r} {problem}")
    if not any("from" in message for message in messages):
        return turns
    return [turn | {"role": ROLES.get(turn["role"], turn["role"])} for turn in turns]


def check_roles(chat: Chat, option: str) -> None:
    """Refuse a conversation without a turn of the assistant whose role is only misspelt.

    `option` is what trains on such turns, in the ValueError.
    """
    roles = list(dict.fromkeys(message["role"] for message in chat))
    if "assistant" in roles:
        return
    misspelt = [role for role in roles if ROLES.get(role.lower()) == "assistant"]
    misspelt += difflib.get_close_matches("assistant", roles)
    if misspelt:
        raise ValueError(
            f"{option}=True trains on messages of the role 'assistant', but this row has the roles "
            f"{', '.join(roles)}. Write 'assistant' instead of {misspelt[0]!r}."
        )


def align_answers(prompt: Any, answers: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """Bring a prompt and its answers, by their columns, into one form, and leave the prompt once.

    Text stays as it is if all is text. Otherwise a text prompt is a message of the user, a text
    answer one of the assistant, and messages with which an answer repeats the prompt are taken
    out of it. What several answers share is in the prompt, if all of them are whole conversations.
    ValueError: what belongs to the prompt is unclear, or something is missing or no message.
    """
    values = {"prompt": prompt, **answers}
    for column, value in values.items():
        if value is None:
            raise ValueError(f"{column!r} {malformed_prompt(None, column)}")
    if all(isinstance(value, str) for value in values.values()):
        return prompt, list(answers.values())
    question = _as_question(prompt)
    chats = {column: _as_answer(value, column, question) for column, value in answers.items()}
    return _without_repetition(question, chats)


def _without_repetition(prompt: Chat, chats: Mapping[str, Chat]) -> tuple[Chat, list[Chat]]:
    """Take the prompt out of answers that repeat it, and system messages before it into it."""
    heads: list[Chat] = []
    rest: list[Chat] = []
    for column, chat in chats.items():
        start, stop = _repeated_prompt(prompt, chat)
        _check_beginning(prompt, chat, stop, column)
        heads.append(chat[:start])
        rest.append(chat[stop:])
    if any(head != heads[0] for head in heads):
        names = " and ".join(map(repr, chats))
        raise ValueError(f"{names} put different messages in front of 'prompt'. Make them equal.")
    are_whole = all(len(a) < len(chat) for a, chat in zip(rest, chats.values(), strict=True))
    if are_whole and len(rest) > 1:
        return split_common(heads[0] + prompt, rest)
    return heads[0] + prompt, rest


def split_common(prompt: Chat, answers: Sequence[Chat]) -> tuple[Chat, list[Chat]]:
    """Move the messages that all answers begin with into the prompt; each keeps at least one."""
    shared = min(len(answer) - 1 for answer in answers)
    identities = [list(map(_identity, answer)) for answer in answers]
    for other in identities[1:]:
        shared = min(shared, common_prefix_length(identities[0], other))
    return prompt + answers[0][:shared], [answer[shared:] for answer in answers]


def _as_question(prompt: object) -> Chat:
    if not isinstance(prompt, str):
        return as_messages(prompt, "prompt")
    return [{"role": "user", "content": prompt}] if prompt else []


def _as_answer(value: object, column: str, prompt: Chat) -> Chat:
    if not isinstance(value, str):
        return as_messages(value, column)
    if not prompt:
        raise ValueError(f"'prompt' has no messages, while {column!r} is text. Add the question.")
    if prompt[-1]["role"] == "assistant":
        raise ValueError(
            f"'prompt' ends with a message of the assistant and {column!r} is text, which may go "
            f"on with it or not. Move that message into {column!r}, or let {column!r} be messages."
        )
    return [{"role": "assistant", "content": value}]


def _repeated_prompt(prompt: Chat, chat: Chat) -> tuple[int, int]:
    """Find the messages (start, stop) with which an answer repeats the prompt, or its end.

    Before `start` are system messages that the prompt lacks. (0, 0): nothing is repeated.
    """
    size = len(prompt)
    prompt_turns = list(map(_identity, prompt))
    turns = list(map(_identity, chat))
    if not prompt_turns:
        return 0, 0
    first = next((i for i, turn in enumerate(chat) if turn["role"] != "system"), len(chat))
    for start in range(first + 1):
        if turns[start : start + size] == prompt_turns:
            return start, start + size
    if prompt[-1]["role"] != "assistant":
        for stop in range(min(size, len(chat)), 0, -1):
            if prompt_turns[-stop:] == turns[:stop]:
                return 0, stop
    return 0, 0


def _identity(message: Row) -> tuple[Any, ...]:
    """Two messages are the same if they say the same, whatever other keys they have."""
    content = text_of_parts(message.get("content"))
    if isinstance(content, str):
        content = content.strip()
    return message["role"], content, message.get("tool_calls") or None


def _check_beginning(prompt: Chat, chat: Chat, repeated: int, column: str) -> None:
    """Refuse an answer that has no answer in it, or that begins with another prompt."""
    if repeated and repeated == len(chat):
        raise ValueError(f"{column!r} repeats 'prompt' and has no answer to it.")
    if not prompt or not chat or repeated:
        return
    role = chat[0]["role"]
    if role == "system" or (role == "user" and prompt[-1]["role"] == "user"):
        raise ValueError(
            f"{column!r} begins with a message of the {role} that 'prompt' does not have: it is "
            f"unclear whether it belongs to the prompt. Let {column!r} begin with the answer to "
            "'prompt'."
        )


def advice_on_instructions(columns: Iterable[str]) -> str:
    """What to do about columns such as those of Alpaca, for the end of a message; or nothing."""
    names = set(columns)
    questions = [name for name in QUESTIONS if name in names]
    answers = [name for name in ANSWERS if name in names]
    if not questions or not answers:
        return ""
    texts = " ".join(f"{{{name}}}" for name in questions)
    return (
        f" Make them of {', '.join(map(repr, [*questions, *answers]))}: in a configuration file by "
        f'`columns: {{prompt: "{texts}", completion: "{{{answers[0]}}}"}}` of an entry of '
        "`datasets`, in Python by formatting_func or dataset.map; see 'Instructions, inputs and "
        "outputs' in docs/dataset_formats.md."
    )


def warn_of_repeated_prompt(example: Mapping[str, Any], columns: Sequence[str]) -> None:
    """Warn if answers in the first row of a dataset, as text, begin with the whole prompt."""
    prompt = example.get("prompt")
    answers = {column: example.get(column) for column in columns}
    if not isinstance(prompt, str) or len(prompt.strip()) < NOTICEABLE:
        return
    begins = [isinstance(text, str) and text.startswith(prompt) for text in answers.values()]
    if begins and all(begins):
        names = " and ".join(map(repr, answers))
        logger.warning(
            f"In the first row, {names} {'begins' if len(answers) == 1 else 'begin'} with the "
            "whole text of 'prompt', which would stand there twice and be trained on. Take it out "
            "of the answers if it is the prompt."
        )


def warn_of_equal_answers(example: Mapping[str, Any]) -> None:
    """Warn if the first row of a dataset prefers an answer to itself."""
    chosen = example.get("chosen")
    if chosen is not None and chosen == example.get("rejected"):
        logger.warning(
            "In the first row, 'chosen' and 'rejected' are equal: nothing is learned from such "
            "rows. Check how the dataset was made, or remove them."
        )
