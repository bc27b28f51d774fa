"""Completions from a user's function."""

import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..data.bounds import ModelBounds
from ..distributed import Ranks
from ..json_files import without_surrogates
from ..timed_calls import copy_containers
from ..types import Prompts
from .base import AroundEngine, FinishReason, Generations, Sampling

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")


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

    The function is called once per round on each rank, as `function(prompts)`, with a prompt for
    each row, those of a group in sequence. It returns a dictionary of lists, one entry per row:

    - `prompt_ids`, `completion_ids`: token ids; the stop token included.
    - `logprobs`: for each completion token the log-probability with which it was drawn.
    - `env_mask` (optional): for each completion token 1, or 0 if the policy did not write it; such
      tokens do not train.
    - anything else: a column for reward functions. A single value goes to every row.

    It may use the `engine` that the trainer has otherwise, as `trainer.backend.engine`.
    """

    function: Callable[[list[Any]], Mapping[str, Any]]
    ranks: Ranks
    bounds: ModelBounds = ModelBounds()

    def __post_init__(self) -> None:
        """What a function reports of its tokens is treated as the report of another engine."""

    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Call the function and check what it returns; see `GenerationBackend`.

        A ValueError names key and row of what is missing, or of the wrong length or kind. If the
        function failed on another rank, it is a `RankError`.
        """
        with self.ranks.fail_together("rollout_func"):
            tokens, columns = _checked(
                self.function(copy_containers(prompts.messages)), len(prompts)
            )
            _check_ids(tokens, self.bounds)
        finish: list[FinishReason] = [
            "stop" if ids and ids[-1] in sampling.stop_ids else "length"
            for ids in tokens["completion_ids"]
        ]
        return Generations(
            completion_ids=tokens["completion_ids"],
            finish=finish,
            sampling_logps=tokens["logprobs"],
            trainable=tokens.get("env_mask"),
            prompt_ids=tokens["prompt_ids"],
            columns=columns,
        )


def _checked(found: Any, count: int) -> tuple[dict[str, list[list[Any]]], list[dict[str, Any]]]:
    if not isinstance(found, Mapping):
        raise _error(f" returned a {type(found).__name__}; it must be a dictionary")
    given = {name: values for name, values in found.items() if values is not None}
    missing = [name for name in REQUIRED if name not in given]
    if missing:
        raise _error(
            f" returned no {', '.join(missing)}; it must return {', '.join(REQUIRED)}, but gave "
            f"{', '.join(map(str, found)) or 'nothing'}"
        )
    tokens = {name: _tokenwise(name, given[name], count) for name in KINDS if name in given}
    _check_lengths(tokens)
    columns = {
        name: without_surrogates(_column(name, values, count))
        for name, values in found.items()
        if name not in KINDS
    }
    return tokens, [{name: values[row] for name, values in columns.items()} for row in range(count)]


def _column(name: str, values: Any, count: int) -> list[Any]:
    is_list = isinstance(values, (list, tuple)) or getattr(values, "ndim", 0) > 0
    return _rows(name, values, count) if is_list else [values] * count


def _check_lengths(tokens: Mapping[str, list[list[Any]]]) -> None:
    for row, ids in enumerate(tokens["completion_ids"]):
        if not tokens["prompt_ids"][row]:
            raise _error(f": prompt_ids of row {row} is empty")
        for name, rows in tokens.items():
            if name != "prompt_ids" and len(rows[row]) != len(ids):
                words = f"{len(rows[row])} entries for {len(ids)} completion tokens"
                raise _error(f": {name} of row {row} has {words}")


def _check_ids(tokens: Mapping[str, list[list[Any]]], bounds: ModelBounds) -> None:
    for name in ("prompt_ids", "completion_ids"):
        for row, ids in enumerate(tokens[name]):
            if (problem := bounds.problem_of_id(max(ids, default=-1))) is not None:
                raise _error(f": {name} of row {row} {problem}")


def _tokenwise(name: str, values: Any, count: int) -> list[list[Any]]:
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
