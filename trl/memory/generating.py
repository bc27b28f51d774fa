"""What generating a round takes, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from .head import Head
from .layer import Layer
from .model_size import ModelSize
from .settings import RunSettings

PREFILL_TOKENS = 4096  # of the prompts that are computed in one forward


@dataclass(frozen=True)
class Generation:
    """Generation of a round on one rank.

    Args:
        model (`ModelSize`): its widths.
        run (`RunSettings`): lengths and bounds.
        layer (`Layer`), head (`Head`): of the model.
    """

    model: ModelSize
    run: RunSettings
    layer: Layer
    head: Head

    def moments(self) -> list[tuple[float, float, float]]:
        """What can be the peak: bytes of the cache, of the head, and of activations."""
        rows, prompts = self.in_flight()
        prompt_cache = self.token * prompts * self.run.prompt
        written = self.capacity() * rows * self.token
        together = prompts * self.run.prompt
        if self.run.shared_prefix:
            together = min(together, max(self.run.prompt, PREFILL_TOKENS))
        growth = self._growth(prompt_cache, written)
        return [
            (prompt_cache, 0.0, self.layer.inference(together) + self.layer.once * together),
            (prompt_cache + written + growth, 0.0, self.layer.inference(rows)),
            (prompt_cache + written, self._drawing(rows), 0.0),
        ]

    @property
    def token(self) -> float:
        """Bytes of the keys and values of one token."""
        return self.layer.keys_and_values(self.run.shared_prefix) * self.model.layers

    def capacity(self) -> int:
        """Tokens a completion has room for in the cache; its last one is never looked at."""
        needed = self.run.completion - 1
        if not self.run.shared_prefix or needed <= 1:
            return needed
        return self._rooms()[1]

    def _rooms(self) -> tuple[int, int]:
        """Sizes of the last two buffers of a growing cache; none exceeds the longest completion."""
        before, room = 0, min(16, self.run.completion)
        while room < self.run.completion - 1:
            before, room = room, min(2 * (room + 1), self.run.completion)
        return before, room

    def in_flight(self) -> tuple[int, int]:
        """Rows that decode together, and copies of prompts that they read."""
        run = self.run
        rows = min(run.rows, run.generation_rows or run.rows)
        if run.generation_kv_gb is not None:
            # The bound is kept as if keys and values had the precision of the weights.
            token = 2 * run.weight_bytes * self.model.keys * self.model.layers
            rows = max(1, min(rows, self._within(int(run.generation_kv_gb * 1e9 / token))))
        return rows, min(rows, run.groups(rows)) if run.shared_prefix else rows

    def _within(self, tokens: int) -> int:
        """The most rows whose prompts and completions are no more than so many tokens."""
        run = self.run
        if not run.shared_prefix:
            return tokens // (run.prompt + run.completion)
        groups, rest = divmod(tokens, run.prompt + run.group_size * run.completion)
        return groups * run.group_size + max(0, rest - run.prompt) // run.completion

    def _growth(self, prompts: float, written: float) -> float:
        """What is held twice while keys or values of one layer move to a larger buffer."""
        if self.run.shared_prefix:
            before, room = self._rooms()
            return written / (2 * self.model.layers) * before / max(1, room)
        return (prompts + written) / (2 * self.model.layers)

    def _drawing(self, rows: int) -> float:
        if self.run.shared_prefix:
            return self.head.sampling(rows)
        return self.head.sampling_at_once(rows)
