"""What an engine that generates must offer, and what all engines share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from ..types import FinishReason, Generations, Prompts, Sampling


class GenerationBackend(Protocol):
    """Where completions come from. The trainer knows nothing else about engines."""

    reports_policy_logps: bool
    """Whether `sampling_logps` are the policy's own, computed with the weights that train."""

    def sync_weights(self, step: int) -> None:
        """Make the engine hold the weights of optimizer step `step`."""
        ...

    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Complete every row; rows of one prompt are `group_size` neighbors.

        Args:
            prompts (`Prompts`): B rows of this rank.
            sampling (`Sampling`): how to draw tokens.
            group_size (`int`): completions for each prompt over all ranks.

        Returns:
            `Generations`: B completions in the order of the rows.
        """
        ...


def kept_awake(backend: GenerationBackend) -> AbstractContextManager[None]:
    """Keep an engine that sleeps outside generation awake for several generations in a row."""
    awake: Callable[[], AbstractContextManager[None]] = getattr(backend, "awake", nullcontext)
    return awake()


def context_of(backend: GenerationBackend) -> int | None:
    """Most tokens that an engine sees of a prompt with its completion; None: as the policy."""
    context: int | None = getattr(backend, "context", None)
    return context


def row_seeds(key: Sequence[object], first_row: int, count: int) -> tuple[int, ...]:
    """Derive one 63-bit seed for each row from what identifies the round.

    The seeds depend on the row's place among all ranks, not on the rank or the batch that
    happens to hold it, so the same run on one process or several draws the same completions.

    Args:
        key: what identifies the round, such as (run seed, "train", round number).
        first_row (`int`): index over all ranks of the first row.
        count (`int`): number of rows.
    """
    prefix = "/".join(map(str, key))
    digests = (
        hashlib.blake2b(f"{prefix}/{row}".encode(), digest_size=8).digest()
        for row in range(first_row, first_row + count)
    )
    return tuple(int.from_bytes(digest, "big") >> 1 for digest in digests)


def cut_at_stop(
    ids: Sequence[int], stop_ids: Sequence[int], max_tokens: int
) -> tuple[list[int], FinishReason]:
    """Cut a completion behind its first stop token.

    Returns:
        The ids up to and including the stop token, and "stop"; or the first `max_tokens` ids and
        "length" if there is no stop token among them.
    """
    kept = list(ids[:max_tokens])
    stops = set(stop_ids)
    for place, token in enumerate(kept):
        if token in stops:
            return kept[: place + 1], "stop"
    return kept, "length"
