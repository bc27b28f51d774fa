"""Rewards for the format, length and repetitiveness of completions."""

import math
import re
from dataclasses import dataclass
from typing import Any

from .accuracy import Completion, accuracy_reward, text_of

THINK = re.compile(r"<think>(?!.*<think>).*?</think>.*", re.DOTALL)


def think_format_reward(completions: list[Completion], **kwargs: Any) -> list[float]:
    """Reward 1.0 if a completion starts with its only `<think>` block and closes it, else 0.0."""
    return [float(THINK.fullmatch(text_of(completion)) is not None) for completion in completions]


@dataclass(frozen=True)
class SoftOverlongPunishment:
    """Penalty for completions near the length limit (DAPO, arXiv 2503.14476).

    The reward is 0 up to `max_completion_len - soft_punish_cache` tokens, and falls linearly to -1
    at `max_completion_len` tokens.
    """

    max_completion_len: int
    soft_punish_cache: int
    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        """Score each completion by its number of tokens."""
        unpunished_length = self.max_completion_len - self.soft_punish_cache
        interval = max(self.soft_punish_cache, 1)
        rewards = []
        for ids in completion_ids:
            reward = (unpunished_length - len(ids)) / interval
            rewards.append(max(-1.0, min(0.0, reward)))
        return rewards


@dataclass(frozen=True)
class CosineScaledReward:
    """Correctness, scaled by the length along half a period of a cosine (arXiv 2502.03373)."""

    max_len: int  # tokens at which the scale ends
    min_value_wrong: float = -1.0  # reward of the shortest wrong answer
    max_value_wrong: float = -0.5  # reward of the longest wrong answer
    min_value_correct: float = 0.5  # reward of the longest correct answer
    max_value_correct: float = 1.0  # reward of the shortest correct answer
    __name__ = "cosine_scaled_reward"

    def __call__(
        self,
        completions: list[Completion],
        solution: list[str],
        completion_ids: list[list[int]],
        **kwargs: Any,
    ) -> list[float | None]:
        """Score each completion; None if its solution is unparseable."""
        accuracies = accuracy_reward(completions, solution)
        return [
            None if accuracy is None else self._score(bool(accuracy), len(ids))
            for accuracy, ids in zip(accuracies, completion_ids, strict=True)
        ]

    def _score(self, is_correct: bool, length: int) -> float:
        cosine = math.cos(math.pi * min(length / self.max_len, 1.0))
        if is_correct:
            longest_reward = self.min_value_correct
            shortest_reward = self.max_value_correct
        else:
            # The shortest wrong answers get the lowest reward, to encourage longer reasoning.
            longest_reward = self.max_value_wrong
            shortest_reward = self.min_value_wrong
        return longest_reward + (shortest_reward - longest_reward) * (1 + cosine) / 2


@dataclass(frozen=True)
class RepetitionPenalty:
    """Penalty for repeated n-grams of tokens (arXiv 2502.03373).

    The reward is 0 without a repetition, and approaches `max_penalty` if all n-grams are the same.
    """

    ngram_size: int = 3  # in tokens
    max_penalty: float = -1.0  # 0 or negative
    __name__ = "repetition_penalty_reward"

    def __post_init__(self) -> None:
        if self.max_penalty > 0:
            raise ValueError(f"max_penalty={self.max_penalty} must be 0 or negative.")

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        """Score each completion by its share of repeated n-grams."""
        return [self._score(ids) for ids in completion_ids]

    def _score(self, ids: list[int]) -> float:
        starts = range(len(ids) - self.ngram_size + 1)
        ngrams = [tuple(ids[start : start + self.ngram_size]) for start in starts]
        if not ngrams:
            return 0.0
        repeated_share = 1 - len(set(ngrams)) / len(ngrams)
        return repeated_share * self.max_penalty


# The names users call: each call returns a reward function.
get_soft_overlong_punishment = SoftOverlongPunishment
get_cosine_scaled_reward = CosineScaledReward
get_repetition_penalty_reward = RepetitionPenalty
