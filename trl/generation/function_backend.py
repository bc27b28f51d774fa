"""Completions from a function of the user."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..distributed import RankError, Ranks
from ..timed_calls import Outcome
from ..types import FinishReason, Generations, Prompts, Sampling
from .base import AroundEngine

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
RolloutFunction = Callable[[list[Any], Any], Mapping[str, Any]]


def _is_token(value: Any) -> bool:
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_whole and int(value) >= 0


# What an entry of each key must be, what it is converted to, and its name in messages.
KINDS: dict[str, tuple[Callable[[Any], bool], Callable[[Any], Any], str]] = {
    "prompt_ids": (_is_token, int, "a token id"),
    "completion_ids": (_is_token, int, "a token id"),
    "logprobs": (lambda value: isinstance(value, numbers.Real), float, "a number"),
    "env_mask": (lambda value: value in (0, 1), bool, "0 or 1"),
}


@dataclass(eq=False)
class FunctionBackend(AroundEngine):
    """Lets a function make the completions: agents, environments, engines of one's own.

    The function is called once a round on each rank, as `function(prompts)`, with one prompt for
    each row: those of a group follow each other. It returns a dictionary of lists with
    one entry for each row:

    - `prompt_ids`, `completion_ids`: token ids; the stop token included.
    - `logprobs`: for each completion token the log-probability with which it was drawn.
    - `env_mask` (optional): for each completion token 1, or 0 if the policy did not write it; such
      tokens do not train.
    - anything else: a column for reward functions. A single value goes to every row.

    It may use the `engine` that the trainer has otherwise, as `trainer.backend.engine`.
    """

    function: Callable[[list[Any]], Mapping[str, Any]]
    ranks: Ranks

    def __post_init__(self) -> None:
        """What a function says of its tokens counts as said by a foreign engine."""

    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Call the function and check what it returns; see `GenerationBackend`.

        A ValueError names key and row of what is missing, or of the wrong length or kind. If the
        function failed on another rank, it is a `RankError`.
        """
        messages = list(prompts.messages)
        outcome = Outcome.of(lambda: _checked(self.function(messages), len(prompts)))
        if isinstance(outcome.failure, RankError):  # from the engine, which the function may use
            raise outcome.failure
        self.ranks.raise_everywhere(outcome.failure, "rollout_func")
        found = outcome.value
        finish: list[FinishReason] = [
            "stop" if ids and ids[-1] in sampling.stop_ids else "length"
            for ids in found["completion_ids"]
        ]
        return Generations(
            completion_ids=found["completion_ids"],
            finish=finish,
            sampling_logps=found["logprobs"],
            trainable=found["env_mask"],
            prompt_ids=found["prompt_ids"],
            columns=found["columns"],
        )


def _checked(found: Any, count: int) -> dict[str, Any]:
    """Turn what a rollout function returned into plain lists, or say what is wrong with it."""
    _check_names(found)
    checked: dict[str, Any] = {
        name: None if found.get(name) is None else _tokenwise(name, found[name], count)
        for name in KINDS
    }
    _check_lengths(checked)
    columns = {
        name: _rows(name, value, count)
        if isinstance(value, (list, tuple)) or getattr(value, "ndim", False)
        else [value] * count
        for name, value in found.items()
        if name not in KINDS
    }
    rows = [{name: values[row] for name, values in columns.items()} for row in range(count)]
    return checked | {"columns": rows}


def _check_names(found: Any) -> None:
    if not isinstance(found, Mapping):
        raise _error(f" returned a {type(found).__name__}; it must be a dictionary")
    missing = [name for name in REQUIRED if found.get(name) is None]
    if missing:
        raise _error(
            f" returned no {', '.join(missing)}; it must return {', '.join(REQUIRED)}, and has "
            f"{', '.join(map(str, found)) or 'nothing'}"
        )


def _check_lengths(checked: dict[str, Any]) -> None:
    for row, ids in enumerate(checked["completion_ids"]):
        if not checked["prompt_ids"][row]:
            raise _error(f": prompt_ids of row {row} is empty")
        for name in ("logprobs", "env_mask"):
            count = len(ids) if checked[name] is None else len(checked[name][row])
            if count != len(ids):
                words = f"{count} entries for {len(ids)} completion tokens"
                raise _error(f": {name} of row {row} has {words}")


def _tokenwise(name: str, values: Any, count: int) -> list[list[Any]]:
    """Convert the entries of each row, one for each token."""
    fits, convert, words = KINDS[name]
    rows = []
    for row, given in enumerate(_rows(name, values, count)):
        entries = _listed(f"{name} of row {row}", given)
        for value in entries:
            if not fits(value):
                raise _error(f": {name} of row {row} holds {value!r:.60}, which is not {words}")
        rows.append(list(map(convert, entries)))
    return rows


def _rows(name: str, values: Any, count: int) -> list[Any]:
    rows = _listed(name, values)
    if len(rows) != count:
        words = "return one for each prompt, in their order"
        raise _error(f": {name} has {len(rows)} rows for {count} prompts; {words}")
    return rows


def _listed(what: str, values: Any) -> list[Any]:
    if hasattr(values, "tolist"):  # tensors and arrays
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise _error(f": {what} is {values!r:.60}; it must be a list")
    return list(values)


def _error(words: str) -> ValueError:
    return ValueError(f"rollout_func{words}.")
