"""Judges, who say which of two completions is better, as reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

REWARDS = {0: (1.0, 0.0), 1: (0.0, 1.0), -1: (None, None)}  # of a pair, by the judge's decision


class PairwiseJudge(Protocol):
    """Compares two completions of each prompt."""

    def judge(self, prompts: list[Any], completions: list[list[Any]]) -> Sequence[int]:
        """Return the place of the better completion of each prompt: 0 or 1; -1: no decision.

        Prompts, and two completions of each, are strings or lists of messages.
        """
        ...


class JudgeReward:
    """Gives 1 to the better of two neighbors and 0 to the other; None where none is better."""

    __name__ = "judge"

    def __init__(self, judge: PairwiseJudge):
        self._judge = judge

    def __call__(
        self, prompts: list[Any], completions: list[Any], **others: Any
    ) -> list[float | None]:
        """Reward completions, those of a prompt next to each other."""
        pairs = [list(pair) for pair in zip(completions[::2], completions[1::2], strict=True)]
        places = [int(place) for place in self._judge.judge(prompts[::2], pairs)]
        if len(places) != len(pairs):
            raise ValueError(f"the judge decided on {len(places)} of {len(pairs)} pairs")
        for place in places:
            if place not in REWARDS:
                raise ValueError(f"the judge returned {place}; it must return 0, 1 or -1")
        return [reward for place in places for reward in REWARDS[place]]
