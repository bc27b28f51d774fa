"""Rewards that shape form, length and repetition."""

import math
import re
from dataclasses import dataclass
from typing import Any

from .accuracy import accuracy_reward, text_of

THINK = re.compile(r"<think>(?!.*<think>).*?</think>.*", re.DOTALL)


def think_format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """1.0 for a completion that begins with one `<think>` block and closes it, else 0.0."""
    return [float(THINK.fullmatch(text_of(completion)) is not None) for completion in completions]


@dataclass(frozen=True)
class SoftOverlongPunishment:
    """0 for short completions; falls over the last tokens of the limit (DAPO, arXiv 2503.14476)."""

    max_completion_len: int  # tokens at which the penalty reaches -1
    soft_punish_cache: int  # tokens over which it falls
    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        """Score each completion by its number of tokens."""
        free = self.max_completion_len - self.soft_punish_cache
        fall = max(self.soft_punish_cache, 1)
        return [max(-1.0, min(0.0, (free - len(ids)) / fall)) for ids in completion_ids]


@dataclass(frozen=True)
class CosineScaledReward:
    """Correctness, scaled along a half cosine of the length (arXiv 2502.03373)."""

    max_len: int  # tokens at which the scale ends
    min_value_wrong: float = -1.0  # of the shortest wrong answer
    max_value_wrong: float = -0.5  # of the longest one
    min_value_correct: float = 0.5  # of the longest correct answer
    max_value_correct: float = 1.0  # of the shortest one
    __name__ = "cosine_scaled_reward"

    def __call__(
        self,
        completions: list[Any],
        solution: list[str],
        completion_ids: list[list[int]],
        **kwargs: Any,
    ) -> list[float | None]:
        """Score each completion; None where correctness cannot be told."""
        correct = accuracy_reward(completions, solution)
        return [
            None if right is None else self._score(bool(right), len(ids))
            for right, ids in zip(correct, completion_ids, strict=True)
        ]

    def _score(self, right: bool, length: int) -> float:
        cosine = math.cos(math.pi * min(length / self.max_len, 1.0))
        # Wrong answers earn least when short, so that thinking on is worth it.
        low, high = self.max_value_wrong, self.min_value_wrong
        if right:
            low, high = self.min_value_correct, self.max_value_correct
        return low + (high - low) * (1 + cosine) / 2


@dataclass(frozen=True)
class RepetitionPenalty:
    """0 without repeated n-grams, `max_penalty` where all are the same (arXiv 2502.03373)."""

    ngram_size: int = 3  # in tokens
    max_penalty: float = -1.0  # 0 or negative; a ValueError otherwise
    __name__ = "repetition_penalty_reward"

    def __post_init__(self) -> None:
        if self.max_penalty > 0:
            raise ValueError(f"max_penalty={self.max_penalty} must be 0 or negative.")

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        """Score each completion by its share of repeated n-grams."""
        return [self._score(ids) for ids in completion_ids]

    def _score(self, ids: list[int]) -> float:
        starts = range(len(ids) - self.ngram_size + 1)
        grams = [tuple(ids[i : i + self.ngram_size]) for i in starts]
        if not grams:
            return 0.0
        return (1 - len(set(grams)) / len(grams)) * self.max_penalty


# Making one of them gives a reward function.
get_soft_overlong_punishment = SoftOverlongPunishment
get_cosine_scaled_reward = CosineScaledReward
get_repetition_penalty_reward = RepetitionPenalty
