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
    prompt: list[int]
    message: Any
    seed: int
    tools: Functions
    ids: list[int] = field(default_factory=list)
    policy_mask: list[bool] = field(default_factory=list)
    logps: list[float] | None = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    pending: list[ToolCall] = field(default_factory=list)
    calls: int = 0
    failures: int = 0

    def add(self, ids: Sequence[int], logps: Sequence[float] | None, is_policy: bool) -> None:
        """Append tokens; log-probabilities are known of all, or of none."""
        self.ids += ids
        self.policy_mask += [is_policy] * len(ids)
        if self.logps is not None:
            self.logps = None if logps is None else [*self.logps, *logps]


@dataclass(eq=False)
class ToolLoop(BackendWrapper):
    """A backend that lets another one continue after each tool call.

    Tokens go from the engine into the next prompt as they are; only the tools' answers are
    tokenized. The policy did not choose those tokens: `Generations.policy_mask` is False on them.

    In each turn all ranks call the engine once, with the same `max_tokens`, as long as one of them
    has a completion that goes on; a rank without one completes a row that is thrown away.
    """

    tools: ToolRunner  # makes the calls
    parse: ToolCallParser  # finds them
    template: ToolResultEncoder  # tokens of the answers
    ranks: Ranks
    turns: int | None = None  # most whose calls are answered
    context_length: int | None = None  # most tokens of prompt and completion together

    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Complete every row, answering its tool calls; see `GenerationBackend`.

        `Sampling.max_tokens` bounds the whole completion, answers included. Answers that leave no
        room for another token are taken back, and the completion ends before them.
        """
        seeds = sampling.with_seeds(len(prompts)).seeds or ()
        tools = prompts.tools or [self.tools.by_name] * len(prompts)
        given = zip(prompts.token_ids, prompts.messages, seeds, tools, strict=True)
        rows = [_Row(list(ids), *others) for ids, *others in given]
        with self.engine.awake():
            self._run(rows, sampling, group_size)
        return _joined(rows)

    def _run(self, rows: list[_Row], sampling: Sampling, group_size: int) -> None:
        active, turn = rows, 0
        while limit := self._longest(active, sampling):
            asked = active or [_Row(rows[0].prompt, rows[0].message, rows[0].seed, {})]
            seeds = [row.seed for row in asked]
            if turn:  # the first one's random streams are those of plain completions
                seeds = [row_seeds((seed, "turn"), turn, 1)[0] for seed in seeds]
            drawn = sampling.replace(max_tokens=limit, seeds=tuple(seeds))
            prompts = Prompts(
                messages=[row.message for row in asked],
                token_ids=[[*row.prompt, *row.ids] for row in asked],
            )
            found = self.engine.generate(prompts, drawn, group_size)
            for place, row in enumerate(active):
                self._write(row, found, place, sampling)
            active = [] if turn == self.turns else self._answered(active, sampling)
            turn, group_size = turn + 1, 1

    def _longest(self, active: Sequence[_Row], sampling: Sampling) -> int:
        """The most tokens a row on any rank may add; 0 if none goes on. All ranks meet here."""
        local = max((self._room(row, sampling) for row in active), default=0)
        return max(self.ranks.gather_objects(local))

    def _room(self, row: _Row, sampling: Sampling) -> int:
        most = sampling.max_tokens
        if self.context_length is not None:
            most = min(most, self.context_length - len(row.prompt))
        return max(0, most - len(row.ids))

    def _write(self, row: _Row, found: Generations, place: int, sampling: Sampling) -> None:
        """Append a turn of the policy, cut to the room there is, and find its calls if it ended."""
        before, room = [*row.prompt, *row.ids], self._room(row, sampling)
        logps = None if found.sampling_logps is None else found.sampling_logps[place][:room]
        ids = found.completion_ids[place]
        kept = ids[:room]
        row.add(kept, logps, is_policy=True)
        row.finish_reason = found.finish_reasons[place] if len(kept) == len(ids) else "length"
        ended = row.finish_reason == "stop"
        is_marked = ended and kept[-1] in sampling.stop_ids  # others end with a text
        message, calls = self.parse(before, kept[:-1] if is_marked else kept)
        row.turns.append(message)
        row.pending = calls if ended else []

    def _answered(self, active: Sequence[_Row], sampling: Sampling) -> list[_Row]:
        """Make the calls of all rows, and return the rows that go on."""
        calls = [call for row in active for call in row.pending]
        results = iter(self.tools(calls, [row.tools for row in active for _ in row.pending]))
        going = []
        for row in active:
            answers = list(islice(results, len(row.pending)))
            row.calls += len(answers)
            row.failures += sum(answer.failed for answer in answers)
            if not answers:
                continue
            messages = [{"role": "tool", "name": x.name, "content": x.content} for x in answers]
            ids = self.template.after(messages)
            if len(ids) < self._room(row, sampling):
                row.add(ids, [0.0] * len(ids), is_policy=False)
                row.turns += messages
                going.append(row)
        return going


def _joined(rows: Sequence[_Row]) -> Generations:
    known = all(row.logps is not None for row in rows)
    return Generations(
        completion_ids=[row.ids for row in rows],
        finish_reasons=[row.finish_reason for row in rows],
        sampling_logps=[row.logps or [] for row in rows] if known else None,
        policy_mask=[row.policy_mask for row in rows],
        messages=[row.turns for row in rows],
        tool_call_counts=[(row.calls, row.failures) for row in rows],
    )
