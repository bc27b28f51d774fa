"""Completions made by a user's function (`rollout_func`)."""

import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..data.bounds import ModelBounds
from ..distributed import Ranks
from ..json_files import without_surrogates
from ..timed_calls import copy_containers
from ..types import Prompts
from .base import BackendWrapper, FinishReason, Generations, Sampling

REQUIRED_KEYS = ("prompt_ids", "completion_ids", "logprobs")


class EntryType(NamedTuple):
    """What the entries of a list of tokens must be."""

    is_valid: Callable[[object], bool]
    convert: Callable[[Any], Any]  # to a plain Python value
    description: str  # for error messages


def _is_token_id(value: object) -> bool:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_integer and int(value) >= 0  # type: ignore[call-overload]


TOKEN_ID = EntryType(_is_token_id, int, "a token id")
# The keys whose values have an entry for each token.
TOKEN_KEYS = {
    "prompt_ids": TOKEN_ID,
    "completion_ids": TOKEN_ID,
    "logprobs": EntryType(lambda value: isinstance(value, numbers.Real), float, "a number"),
    "env_mask": EntryType(lambda value: value in (0, 1), bool, "0 or 1"),
}
TokenLists = dict[str, list[list[Any]]]  # by key, B ragged


@dataclass(eq=False)
class FunctionBackend(BackendWrapper):
    """Lets a user's function make the completions, with agents, environments or another engine.

    Each rank calls it once per rollout batch as `function(prompts)`, with one prompt per row; rows
    of a group are consecutive. It returns a dictionary of lists with one entry per row:

    - `prompt_ids`, `completion_ids`: token ids; completions include their stop token.
    - `logprobs`: the log-probability with which each completion token was sampled.
    - `env_mask` (optional): 1 for each completion token, or 0 if the policy did not write it; such
      tokens are left out of the loss.
    - any other key: a column for reward functions. A value that is no list goes to every row.

    The function may use the trainer's own engine, `trainer.backend.engine`.
    """

    function: Callable[[list[Any]], Mapping[str, Any]]
    ranks: Ranks
    bounds: ModelBounds = ModelBounds()

    def __post_init__(self) -> None:
        """Keep `reports_policy_logps` False: the function may have used another model."""

    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Call the function and check what it returns; see `GenerationBackend`.

        A ValueError names the key and row of a value that is missing or has a wrong length or type.
        If the function fails on another rank, this raises `RankError`.
        """
        with self.ranks.fail_together("rollout_func"):
            result = self.function(copy_containers(prompts.messages))
            token_lists = _checked_token_lists(result, len(prompts))
            extra_columns = _extra_columns(result, len(prompts))
            _check_vocabulary(token_lists, self.bounds)
        finish_reasons: list[FinishReason] = [
            "stop" if ids and ids[-1] in sampling.stop_ids else "length"
            for ids in token_lists["completion_ids"]
        ]
        return Generations(
            completion_ids=token_lists["completion_ids"],
            finish_reasons=finish_reasons,
            sampling_logps=token_lists["logprobs"],
            policy_mask=token_lists.get("env_mask"),
            prompt_ids=token_lists["prompt_ids"],
            extra_columns=extra_columns,
        )


def _checked_token_lists(result: object, num_rows: int) -> TokenLists:
    if not isinstance(result, Mapping):
        raise _error(f" returned a {type(result).__name__}; it must be a dictionary")
    missing = [key for key in REQUIRED_KEYS if result.get(key) is None]
    if missing:
        raise _error(
            f" returned no {', '.join(missing)}; it must return {', '.join(REQUIRED_KEYS)}, but "
            f"gave {', '.join(map(str, result)) or 'nothing'}"
        )
    token_lists = {
        key: _token_lists_of(key, result[key], num_rows)
        for key in TOKEN_KEYS
        if result.get(key) is not None
    }
    _check_lengths(token_lists)
    return token_lists


def _extra_columns(result: Mapping[str, Any], num_rows: int) -> list[dict[str, Any]]:
    """Return the values of all other keys for each row."""
    columns = {
        name: without_surrogates(_column(name, values, num_rows))
        for name, values in result.items()
        if name not in TOKEN_KEYS
    }
    return [{name: values[row] for name, values in columns.items()} for row in range(num_rows)]


def _column(name: str, values: object, num_rows: int) -> list[Any]:
    is_list = isinstance(values, (list, tuple)) or getattr(values, "ndim", 0) > 0
    return _row_values(name, values, num_rows) if is_list else [values] * num_rows


def _check_lengths(token_lists: TokenLists) -> None:
    """Check that each completion token has an entry in every list, and no prompt is empty."""
    for row, ids in enumerate(token_lists["completion_ids"]):
        if not token_lists["prompt_ids"][row]:
            raise _error(f": prompt_ids of row {row} is empty")
        for key, rows in token_lists.items():
            if key != "prompt_ids" and len(rows[row]) != len(ids):
                raise _error(
                    f": {key} of row {row} has {len(rows[row])} entries for {len(ids)} completion "
                    "tokens"
                )


def _check_vocabulary(token_lists: TokenLists, bounds: ModelBounds) -> None:
    for key in ("prompt_ids", "completion_ids"):
        for row, ids in enumerate(token_lists[key]):
            problem = bounds.problem_of_id(max(ids, default=-1))
            if problem is not None:
                raise _error(f": {key} of row {row} {problem}")


def _token_lists_of(key: str, values: object, num_rows: int) -> list[list[Any]]:
    entry_type = TOKEN_KEYS[key]
    rows = []
    for row, row_value in enumerate(_row_values(key, values, num_rows)):
        entries = _as_list(f"{key} of row {row}", row_value)
        for entry in entries:
            if not entry_type.is_valid(entry):
                raise _error(
                    f": {key} of row {row} holds {entry!r:.60}, which is not "
                    f"{entry_type.description}"
                )
        rows.append([entry_type.convert(entry) for entry in entries])
    return rows


def _row_values(key: str, values: object, num_rows: int) -> list[Any]:
    rows = _as_list(key, values)
    if len(rows) != num_rows:
        raise _error(
            f": {key} has {len(rows)} rows for {num_rows} prompts; return one for each prompt, in "
            "their order"
        )
    return rows


def _as_list(description: str, values: Any) -> list[Any]:
    if hasattr(values, "tolist"):  # tensors and arrays
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise _error(f": {description} is {values!r:.60}; it must be a list")
    return list(values)


def _error(problem: str) -> ValueError:
    return ValueError(f"rollout_func{problem}.")
