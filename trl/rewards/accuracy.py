"""Rewards for the right mathematical answer, checked by `math-verify`."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..imports import require

PARSE_SECONDS, VERIFY_SECONDS = 10, 5
UNPARSED, SKIPPED = "[unparseable]", "[skipped]"
LogExtra = Callable[[str, list[Any]], None] | None


def text_of(completion: Any) -> str:
    """The text of a completion: a string, or the content of its first message; empty without."""
    if isinstance(completion, str):
        return completion
    return (completion[0].get("content") or "") if completion else ""


def accuracy_reward(
    completions: list[Any],
    solution: list[str],
    log_extra: LogExtra = None,
    **kwargs: Any,
) -> list[float | None]:
    """1.0 if the answer equals the solution, 0.0 if not, None if the solution cannot be parsed.

    Completions are strings, or lists of messages. `log_extra` receives what was compared, as three
    columns. Needs math-verify.
    """
    return _rewards([text_of(completion) for completion in completions], solution, log_extra)


def reasoning_accuracy_reward(
    completions: list[Any],
    solution: list[str],
    reasoning_delimiters: list[str] | None = None,
    log_extra: LogExtra = None,
    **kwargs: Any,
) -> list[float | None]:
    """`accuracy_reward` of what follows the reasoning; 0.0 where the reasoning does not end.

    The reasoning ends with the last occurrence of a delimiter: the first of `reasoning_delimiters`,
    by default `</think>`, that occurs.
    """
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    answers: list[str | None] = []
    for text in map(text_of, completions):
        end = next((d for d in delimiters if d in text), None)
        answers.append(None if end is None else text.rsplit(end, 1)[1])
    return _rewards(answers, solution, log_extra)


def _rewards(texts: Sequence[str | None], solution: list[str], log: LogExtra) -> list[float | None]:
    """Grade texts; None is an answer that was never given."""
    graded = [
        (0.0, SKIPPED, SKIPPED) if text is None else _grade(text, right)
        for text, right in zip(texts, solution, strict=True)
    ]
    if log is not None:
        log("solution", list(solution))
        log("gold_parsed", [gold for _, gold, _ in graded])
        log("answer_parsed", [answer for _, _, answer in graded])
    return [reward for reward, _, _ in graded]


def _grade(text: str, solution: str) -> tuple[float | None, str, str]:
    math_verify = require("math_verify", "accuracy_reward")
    units = require("latex2sympy2_extended", "accuracy_reward").NormalizationConfig(units=True)
    # Answers are LaTeX, boxed ones first, with units taken off.
    latex = math_verify.LatexExtractionConfig(
        normalization_config=units, boxed_match_priority=0, try_extract_without_anchor=False
    )
    # Time limits work by signals, which only the main thread receives.
    limited = threading.current_thread() is threading.main_thread()
    parsing = {"parsing_timeout": PARSE_SECONDS if limited else None}
    gold = math_verify.parse(solution, **parsing)
    if not gold:
        return None, UNPARSED, SKIPPED
    found = {"extraction_config": [latex], "extraction_mode": "first_match"}
    answer = math_verify.parse(text, **found, **parsing)
    right = math_verify.verify(gold, answer, timeout_seconds=VERIFY_SECONDS if limited else None)
    return float(right), str(gold), str(answer) if answer else UNPARSED
