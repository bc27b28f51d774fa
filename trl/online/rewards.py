"""Calling reward functions, checking what they return, and gathering it over all ranks."""

import difflib
import inspect
import math
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Timer
from typing import TYPE_CHECKING, Any, Self

import torch

from ..distributed import Ranks
from ..number_format import pluralize
from ..timed_calls import CallTimeout, Outcome, TimedCalls, copy_containers
from ..types import RewardTable
from .reward_sources import ModelReward, RewardSource

if TYPE_CHECKING:
    from transformers import TrainerState

RESERVED = ("prompt", "completion", "completion_ids")
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# Arguments of reward functions besides columns: columns of these names are not passed.
ARGUMENTS = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
)
SLOW_TRIAL = 30.0  # seconds after which a message says that a trial is still running
LARGEST = torch.finfo(torch.float32).max
LogMetric = Callable[[str, float], None]  # name and value
# From a number of rows and a function that scores a range of them, to the scores of each range.
InPieces = Callable[[int, Callable[[range], list[float]]], list[list[float]]]


@dataclass(frozen=True)
class RewardInputs:
    """The arguments of reward functions for the B rows of this rank."""

    rows: Sequence[dict[str, Any]]  # of the dataset
    completions: list[Any]  # strings, or lists of messages
    completion_ids: list[list[int]]
    trainer_state: "TrainerState"

    def column(self, name: str) -> list[Any]:
        """Return a column of the dataset; None for rows without it."""
        return [row.get(name) for row in self.rows]

    def keywords(self, columns: dict[str, list[Any]], log_metric: LogMetric) -> dict[str, Any]:
        """Return the keyword arguments of one reward function: copies, which it may change.

        The function's `log_extra(column, values)` adds to `columns`.
        """

        def log_extra(column: str, values: Sequence[Any]) -> None:
            entries = list(values)
            if len(entries) != len(self.completions):
                num_entries = pluralize(len(entries), "value")
                num_rows = pluralize(len(self.completions), "completion")
                raise ValueError(f"log_extra({column!r}) got {num_entries} for {num_rows}")
            columns[column] = entries

        names = dict.fromkeys(name for row in self.rows for name in row if name not in RESERVED)
        return {name: copy_containers(self.column(name)) for name in names} | {
            "prompts": copy_containers(self.column("prompt")),
            "completions": copy_containers(self.completions),
            "completion_ids": copy_containers(self.completion_ids),
            "trainer_state": self.trainer_state,
            "log_extra": log_extra,
            "log_metric": log_metric,
        }


class RewardError(RuntimeError):
    """A reward function failed, or did not return a list of rewards."""


class RewardSuite:
    """All reward functions of a run, as `resolve_rewards` returned them.

    `weights` are for the sources without a weight of their own; None: all are 1. A call may take
    `timeout` seconds. `in_pieces(count, score)` lets reward models score `count` rows a few at a
    time: it calls `score` with ranges of rows, and returns the results in their order.
    """

    def __init__(
        self,
        sources: Sequence[RewardSource],
        weights: Sequence[float] | None,
        timeout: float | None,
        ranks: Ranks,
        in_pieces: InPieces = lambda count, score: [score(range(count))],
    ):
        names = [source.name for source in sources if source.weight is None]
        if weights is not None and len(weights) != len(names):
            raise ValueError(
                f"reward_weights has {pluralize(len(weights), 'entry', 'entries')} for "
                f"{pluralize(len(names), 'reward function')} ({', '.join(names)})."
            )
        if not all(map(math.isfinite, weights or ())):
            raise ValueError(f"reward_weights={weights} must be finite.")
        self.sources = tuple(sources)
        option_weights = iter([1.0] * len(names) if weights is None else weights)
        self.weights = torch.tensor([source.weight or next(option_weights) for source in sources])
        self._calls = TimedCalls(timeout)
        self._ranks = ranks
        self._in_pieces = in_pieces

    def to(self, device: torch.device) -> Self:
        """Move reward models to `device`."""
        for source in self.sources:
            if isinstance(source, ModelReward):
                source.model.to(device)
        return self

    def __call__(
        self, inputs: RewardInputs, group_size: int, log_metric: LogMetric
    ) -> tuple[RewardTable, dict[str, list[Any]]]:
        """Score the B rows of this rank, `group_size` of each prompt, and gather all rewards.

        Returns the table of all N rows, and the columns that functions added with
        `log_extra(column, values)`, B values each. If a function fails, its rank raises
        `RewardError`, and the other ranks `RankError`.
        """
        extras: dict[str, list[Any]] = {}
        with self._ranks.fail_together("rewards"):
            columns = self._call(self.sources, inputs, extras, log_metric)
        rewards = [[math.nan if x is None else x for x in column] for column in columns]
        local = torch.tensor(rewards, dtype=torch.float32).T
        values = self._ranks.gather(local)
        if rows := local.isnan().all(1).nonzero().flatten().tolist():
            warnings.warn(
                f"No reward function scored {pluralize(len(rows), 'completion')}; the first is row "
                f"{rows[0]} of rank {self._ranks.rank}: {inputs.completions[rows[0]]!r:.80}. Such "
                "rows are not trained on.",
                stacklevel=2,
            )
        weights = self.weights.to(values.device)
        total = (values * weights).nansum(1)
        table = RewardTable(
            per_function=values,
            weights=weights,
            total=total.masked_fill(values.isnan().all(1), torch.nan),
            names=tuple(source.name for source in self.sources),
            group_size=group_size,
        )
        return table, extras

    def dry_run(
        self, row: dict[str, Any], trainer_state: "TrainerState", group_size: int = 1
    ) -> None:
        """Call every function on one row with placeholder completions; mistakes are ValueErrors."""
        text = "0"
        is_text = isinstance(row["prompt"], str)
        completion = text if is_text else [{"role": "assistant", "content": text}]
        inputs = RewardInputs(
            rows=[row] * group_size,
            completions=[completion] * group_size,
            completion_ids=[[0]] * group_size,
            trainer_state=trainer_state,
        )
        for source in self.sources:
            if isinstance(source, ModelReward):
                continue
            message = f"The reward function {source.name!r} is still busy with a trial on row 0."
            timer = Timer(SLOW_TRIAL, print, [message, "Set reward_timeout to limit it."])
            timer.daemon = True
            timer.start()
            try:
                column = self._call([source], inputs, {}, lambda name, value: None)[0]
            except RewardError as error:
                raise ValueError(
                    f"{error} This was a trial on the first row, {row!r:.200}, with the completion "
                    f"{text!r}; reward_dry_run=False skips the trial."
                ) from error
            finally:
                timer.cancel()
            if any(value is not None and math.isnan(value) for value in column):
                warnings.warn(
                    f"The reward function {source.name!r} returned NaN on the first row; return "
                    "None for completions it cannot score.",
                    stacklevel=2,
                )

    def _call(
        self,
        sources: Sequence[RewardSource],
        inputs: RewardInputs,
        extras: dict[str, list[Any]],
        log_metric: LogMetric,
    ) -> list[list[float | None]]:
        """Call models and then functions, and return the checked rewards of each source."""
        added: dict[str, dict[str, list[Any]]] = {source.name: {} for source in sources}
        outcomes: dict[str, Outcome] = {}
        calls: dict[str, Callable[[], Any]] = {}
        for source in sources:
            if isinstance(source, ModelReward):
                outcomes[source.name] = Outcome.of(partial(self._scored, source, inputs))
            else:
                keywords = inputs.keywords(added[source.name], log_metric)
                if problem := _argument_problem(source.function, keywords):
                    raise _error(source.name, problem)
                calls[source.name] = partial(source.function, **keywords)
        outcomes |= zip(calls, self._calls([*calls.values()]), strict=True)
        rows = len(inputs.completions)
        rewards = [_rewards(source.name, outcomes[source.name], rows) for source in sources]
        # In the order of the sources, so that all ranks have the same names.
        for name, columns in added.items():
            for column, values in columns.items():
                extras[f"{name}/{column}" if column in extras else column] = values
        return rewards

    def _scored(self, source: ModelReward, inputs: RewardInputs) -> list[float]:
        count = len(inputs.completions)
        prompts = inputs.column("prompt")
        template_kwargs = inputs.column("chat_template_kwargs")

        def score(rows: range) -> list[float]:
            chunk = slice(rows.start, rows.stop)
            return source.score(prompts[chunk], inputs.completions[chunk], template_kwargs[chunk])

        return [reward for rewards in self._in_pieces(count, score) for reward in rewards]


def _argument_problem(function: Callable[..., Any], keywords: Mapping[str, Any]) -> str | None:
    """Return an error text if a reward function cannot be called with these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions of C extensions have no signature
        return None
    with suppress(TypeError):
        signature.bind(**keywords)
        return None
    missing = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind in NAMED and parameter.default is parameter.empty and name not in keywords
    ]
    if missing:
        return _missing_column(missing[0], [name for name in keywords if name not in ARGUMENTS])
    return _unexpected([name for name in keywords if name not in signature.parameters])


def _unexpected(arguments: Sequence[str]) -> str:
    names = ", ".join(map(repr, arguments[:3]))
    if len(arguments) > 3:
        names += ", ..."
    return (
        f"does not accept {names}: functions get all columns and more by name. Add **kwargs to its "
        "arguments"
    )


def _missing_column(name: str, columns: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, columns, n=1)
    if nearest:
        return f"needs the column {name!r}, which the dataset lacks; the nearest is {nearest[0]!r}"
    present = f"it has {', '.join(map(repr, columns))}" if columns else "it has prompts alone"
    return f"needs the column {name!r}, which the dataset lacks; {present}"


def _rewards(name: str, outcome: Outcome, rows: int) -> list[float | None]:
    """Return a number or None for each row; a `RewardError` says what is wrong with the outcome."""
    if isinstance(outcome.failure, CallTimeout):
        raise _error(name, f"{outcome.error_text} (reward_timeout)") from outcome.failure
    if outcome.failure is not None:
        raise _error(name, f"failed: {outcome.error_text}") from outcome.failure
    values = outcome.value
    if hasattr(values, "tolist"):  # tensors and arrays
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        returned = type(values).__name__
        expected = pluralize(rows, "number")
        raise _error(name, f"returned a {returned}; it must return a list of {expected}")
    if len(values) != rows:
        num_rewards = pluralize(len(values), "reward")
        num_rows = pluralize(rows, "completion")
        raise _error(name, f"returned {num_rewards} for {num_rows}")
    return [_number(name, row, value) for row, value in enumerate(values)]


def _number(name: str, row: int, value: Any) -> float | None:
    if value is None:
        return None
    is_scalar = getattr(value, "ndim", 1) == 0 and hasattr(value, "item")
    number = value.item() if is_scalar else value
    where = f"for row {row}; a reward must be"
    if not isinstance(number, numbers.Real):
        raise _error(name, f"returned {value!r:.60} {where} a number or None")
    if abs(number) > LARGEST:
        raise _error(name, f"returned {value!s:.60} {where} finite in float32")
    return float(number)


def _error(name: str, problem: str) -> RewardError:
    return RewardError(f"The reward function {name!r} {problem}.")
