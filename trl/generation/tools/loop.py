"""Completions in which the policy calls tools and reads their results."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ...distributed import Ranks
from ...types import Prompts
from ..base import BackendWrapper, FinishReason, Generations, Sampling, row_seeds
from .calls import Functions, ToolCall, ToolCallParser, ToolRunner
from .templates import ToolResultEncoder


@dataclass
class _Row:
    """A row and its completion so far."""

    prompt_ids: list[int]
    prompt: Any  # a string, or a list of messages
    seed: int
    tools: Functions  # that the row may call
    completion_ids: list[int] = field(default_factory=list)
    policy_mask: list[bool] = field(default_factory=list)
    logps: list[float] | None = field(default_factory=list)  # None: the engine reports none
    messages: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    pending_calls: list[ToolCall] = field(default_factory=list)
    num_calls: int = 0
    num_failed_calls: int = 0

    @property
    def ids(self) -> list[int]:
        """Prompt and completion."""
        return self.prompt_ids + self.completion_ids

    def append(self, ids: Sequence[int], logps: Sequence[float] | None, by_policy: bool) -> None:
        """Append tokens and their log-probabilities."""
        self.completion_ids += ids
        self.policy_mask += [by_policy] * len(ids)
        if self.logps is not None:
            self.logps = None if logps is None else [*self.logps, *logps]


@dataclass(eq=False)
class ToolLoop(BackendWrapper):
    """A backend in which another backend continues each completion after its tool calls.

    The engine's tokens go into the next prompt unchanged; only tool results are tokenized.
    `Generations.policy_mask` is False on the tokens of results.

    In each turn, all ranks call the engine once with the same `max_tokens`, until no rank has an
    unfinished completion. A rank without one completes a filler row, whose result is discarded.
    """

    tools: ToolRunner
    parser: ToolCallParser
    result_encoder: ToolResultEncoder
    ranks: Ranks
    max_iterations: int | None = None  # turns whose calls are answered; None: no limit
    context_length: int | None = None  # maximum tokens of prompt plus completion; None: no limit

    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Complete every row, answering its tool calls; see `GenerationBackend`.

        `Sampling.max_tokens` limits the whole completion, including tool results. If results leave
        no room for another token, they are dropped and the completion ends before them.
        """
        seeds = sampling.with_seeds(len(prompts)).seeds or ()
        tools = prompts.tools or [self.tools.by_name] * len(prompts)
        rows = [
            _Row(prompt_ids=list(prompt_ids), prompt=prompt, seed=seed, tools=row_tools)
            for prompt_ids, prompt, seed, row_tools in zip(
                prompts.token_ids, prompts.messages, seeds, tools, strict=True
            )
        ]
        with self.engine.awake():
            self._run_turns(rows, sampling, group_size)
        return _make_generations(rows)

    def _run_turns(self, rows: list[_Row], sampling: Sampling, group_size: int) -> None:
        unfinished = rows
        turn = 0
        max_tokens = self._max_tokens(unfinished, sampling)
        while max_tokens > 0:
            filler = _Row(rows[0].prompt_ids, rows[0].prompt, rows[0].seed, {})
            batch = unfinished or [filler]
            prompts = Prompts(
                messages=[row.prompt for row in batch], token_ids=[row.ids for row in batch]
            )
            turn_sampling = sampling.replace(max_tokens=max_tokens, seeds=_turn_seeds(batch, turn))
            generations = self.engine.generate(prompts, turn_sampling, group_size)
            for index, row in enumerate(unfinished):
                self._append_turn(row, generations, index, sampling)
            if turn == self.max_iterations:
                unfinished = []
            else:
                unfinished = self._answer_calls(unfinished, sampling)
            turn += 1
            group_size = 1  # the rows of a group have different prompts from now on
            max_tokens = self._max_tokens(unfinished, sampling)

    def _max_tokens(self, unfinished: Sequence[_Row], sampling: Sampling) -> int:
        """Return the most tokens that a row of any rank may add; 0 if none is unfinished.

        All ranks must call it together.
        """
        local = max((self._remaining_tokens(row, sampling) for row in unfinished), default=0)
        return max(self.ranks.gather_objects(local))

    def _remaining_tokens(self, row: _Row, sampling: Sampling) -> int:
        max_tokens = sampling.max_tokens
        if self.context_length is not None:
            max_tokens = min(max_tokens, self.context_length - len(row.prompt_ids))
        return max(0, max_tokens - len(row.completion_ids))

    def _append_turn(
        self, row: _Row, generations: Generations, index: int, sampling: Sampling
    ) -> None:
        """Append a turn of the policy, truncated to the row's limit, and parse its calls."""
        ids_before = row.ids
        limit = self._remaining_tokens(row, sampling)
        ids = generations.completion_ids[index]
        row.finish_reason = generations.finish_reasons[index] if len(ids) <= limit else "length"
        ids = ids[:limit]
        logps = None
        if generations.sampling_logps is not None:
            logps = generations.sampling_logps[index][:limit]
        row.append(ids, logps, by_policy=True)
        is_complete = row.finish_reason == "stop"
        # A turn that ends with a stop string has no stop token.
        has_stop_token = is_complete and ids[-1] in sampling.stop_ids
        message, calls = self.parser(ids_before, ids[:-1] if has_stop_token else ids)
        row.messages.append(message)
        row.pending_calls = calls if is_complete else []

    def _answer_calls(self, unfinished: Sequence[_Row], sampling: Sampling) -> list[_Row]:
        """Make the calls of all rows, append the results, and return the rows that go on."""
        calls = [call for row in unfinished for call in row.pending_calls]
        functions = [row.tools for row in unfinished for _ in row.pending_calls]
        all_results = iter(self.tools(calls, functions))
        continued = []
        for row in unfinished:
            results = list(islice(all_results, len(row.pending_calls)))
            row.num_calls += len(results)
            row.num_failed_calls += sum(result.failed for result in results)
            if not results:
                continue
            messages = [
                {"role": "tool", "name": result.name, "content": result.content}
                for result in results
            ]
            ids = self.result_encoder.encode(messages)
            if len(ids) < self._remaining_tokens(row, sampling):
                row.append(ids, [0.0] * len(ids), by_policy=False)
                row.messages += messages
                continued.append(row)
        return continued


def _turn_seeds(rows: Sequence[_Row], turn: int) -> tuple[int, ...]:
    """Return a seed per row. The first turn samples as a completion without tools does."""
    if turn == 0:
        return tuple(row.seed for row in rows)
    return tuple(row_seeds((row.seed, "turn"), turn, 1)[0] for row in rows)


def _make_generations(rows: Sequence[_Row]) -> Generations:
    has_logps = all(row.logps is not None for row in rows)
    return Generations(
        completion_ids=[row.completion_ids for row in rows],
        finish_reasons=[row.finish_reason for row in rows],
        sampling_logps=[row.logps or [] for row in rows] if has_logps else None,
        policy_mask=[row.policy_mask for row in rows],
        messages=[row.messages for row in rows],
        tool_call_counts=[(row.num_calls, row.num_failed_calls) for row in rows],
    )
