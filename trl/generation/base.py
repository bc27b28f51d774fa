"""What an engine that generates must offer, and what all engines share."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..types import FinishReason, Generations, Prompts, Sampling


class GenerationBackend(ABC):
    """Where completions come from. The trainer knows nothing else about engines.

    Attributes:
        reports_policy_logps (`bool`): whether `sampling_logps` are the policy's own, computed with
            the weights that train.
        context (`int`, *optional*): most tokens of a prompt with its completion. None: as many as
            the policy sees.
    """

    reports_policy_logps = False
    context: int | None = None

    def sync_weights(self, step: int) -> None:  # noqa: B027
        """Make the engine hold the weights of optimizer step `step`, unless it is the policy."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep an engine that sleeps outside generation awake for several generations in a row."""
        yield

    @abstractmethod
    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Complete every row; rows of one prompt are `group_size` neighbors.

        Args:
            prompts (`Prompts`): B rows of this rank.
            sampling (`Sampling`): how to draw tokens.
            group_size (`int`): completions for each prompt over all ranks.

        Returns:
            `Generations`: B completions in the order of the rows.
        """


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


def cut_generations(
    rows: Sequence[Sequence[int]], sampling: Sampling, logps: list[list[float]] | None = None
) -> Generations:
    """Cut each completion as `cut_at_stop` does; `logps` are those of the tokens that are left."""
    cut = [cut_at_stop(row, sampling.stop_ids, sampling.max_tokens) for row in rows]
    return Generations(
        completion_ids=[ids for ids, _ in cut],
        finish=[reason for _, reason in cut],
        sampling_logps=logps,
    )
