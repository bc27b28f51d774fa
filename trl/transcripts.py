"""Render prompts and completions as text for people. Imports the standard library alone."""

from collections.abc import Iterable, Mapping
from typing import Any


def transcript(text_or_messages: str | Iterable[Mapping[str, Any]]) -> str:
    """Render a prompt or completion: text as it is, messages as one "role: content" line each.

    Tool calls follow the content, as `name(arguments)`.
    """
    if isinstance(text_or_messages, str):
        return text_or_messages
    return "\n".join(_message_line(message) for message in text_or_messages)


def _message_line(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls") or []
    functions = [call.get("function", call) for call in calls]
    call_texts = [f"{function.get('name')}({function.get('arguments')})" for function in functions]
    return " ".join([f"{message['role']}: {message.get('content')}", *call_texts])
