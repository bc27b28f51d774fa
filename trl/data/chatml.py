"""Converting turns written with `from` and `value`."""

from __future__ import annotations

from typing import Any

COLUMNS = ("prompt", "completion", "chosen", "rejected", "messages", "conversations")


def maybe_convert_to_chatml(example: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Rename `from` to `role` and `value` to `content`, and `conversations` to `messages`.

    Args:
        example (`dict`): one row; returned as a new dictionary. Other formats are unchanged.
    """
    found = dict(example)
    for column in COLUMNS:
        if isinstance(found.get(column), list):
            found[column] = [_turn(turn) for turn in found[column]]
    if "conversations" in found:
        found["messages"] = found.pop("conversations")
    return found


def _turn(turn: Any) -> Any:
    if not isinstance(turn, dict) or not {"from", "value"} & turn.keys():
        return turn
    names = {"from": "role", "value": "content"}
    return {names.get(key, key): value for key, value in turn.items()}
