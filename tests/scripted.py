"""A backend that replays given completions, so that whole steps are deterministic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trl.generation.base import GenerationBackend, Generations, Sampling, generations_from_rows
from trl.types import Prompts

Script = Callable[[Sequence[int], int], Sequence[int]]


class ScriptedBackend(GenerationBackend):
    """Returns completions from a function of the prompt's ids and the row's place in its group.

    Args:
        script: called as `script(prompt_ids, place)`; returns token ids, with or without a stop
            token. What follows the first stop token is dropped.
        first_row: index over all ranks of this rank's first row, for groups that span ranks.
    """

    def __init__(self, script: Script, first_row: Callable[[int], int] = lambda count: 0):
        self._script = script
        self._first_row = first_row
        self.synced_steps: list[int] = []
        self.calls: list[Sampling] = []

    def sync_weights(self, step: int) -> None:
        """Note the step."""
        self.synced_steps.append(step)

    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Replay completions; see `GenerationBackend`."""
        self.calls.append(sampling)
        start = self._first_row(len(prompts))
        rows = enumerate(prompts.token_ids, start)
        return generations_from_rows(
            [self._script(ids, row % group_size) for row, ids in rows], sampling
        )
