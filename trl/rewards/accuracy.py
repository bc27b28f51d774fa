"""Rewards for correct mathematical answers, checked by the package `math-verify`."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..imports import require

PARSE_SECONDS = 10
VERIFY_SECONDS = 5
UNPARSEABLE = "[unparseable]"
SKIPPED = "[skipped]"
Completion: TypeAlias = str | list[dict[str, Any]]
LogExtra: TypeAlias = Callable[[str, list[Any]], None] | None


def text_of(completion: Completion) -> str:
    """Return the text of a completion: a string, or the content of its first message."""
    if isinstance(completion, str):
        return completion
    return (completion[0].get("content") or "") if completion else ""


def accuracy_reward(
    completions: list[Completion],
    solution: list[str],
    log_extra: LogExtra = None,
    **kwargs: Any,
) -> list[float | None]:
    """Reward 1.0 if the answer equals the solution, else 0.0; None if the solution is unparseable.

    Needs math-verify.

    Args:
        completions: strings, or lists of messages.
        log_extra: receives three columns: the solution, the parsed solution and the parsed answer.
    """
    answers = [text_of(completion) for completion in completions]
    return _grade_all(answers, solution, log_extra)


def reasoning_accuracy_reward(
    completions: list[Completion],
    solution: list[str],
    reasoning_delimiters: list[str] | None = None,
    log_extra: LogExtra = None,
    **kwargs: Any,
) -> list[float | None]:
    """Compute `accuracy_reward` of the text after the reasoning; 0.0 if the reasoning has no end.

    Args:
        reasoning_delimiters: the first of them that occurs in a completion ends the reasoning, at
            its last occurrence. `</think>` by default.
    """
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    answers: list[str | None] = []
    for text in map(text_of, completions):
        delimiter = next((delimiter for delimiter in delimiters if delimiter in text), None)
        answers.append(None if delimiter is None else text.rsplit(delimiter, 1)[1])
    return _grade_all(answers, solution, log_extra)


@dataclass(frozen=True)
class Grade:
    """The reward of an answer, and the parsed solution and answer as text, for the log."""

    reward: float | None
    parsed_solution: str
    parsed_answer: str


def _grade_all(
    answers: Sequence[str | None], solutions: list[str], log_extra: LogExtra
) -> list[float | None]:
    """Reward answers; None, an answer that was not given, gets 0.0."""
    grades = []
    for answer, solution in zip(answers, solutions, strict=True):
        if answer is None:
            grades.append(Grade(0.0, SKIPPED, SKIPPED))
        else:
            grades.append(_grade(answer, solution))
    if log_extra is not None:
        log_extra("solution", list(solutions))
        log_extra("gold_parsed", [grade.parsed_solution for grade in grades])
        log_extra("answer_parsed", [grade.parsed_answer for grade in grades])
    return [grade.reward for grade in grades]


def _grade(answer: str, solution: str) -> Grade:
    math_verify = require("math_verify", "accuracy_reward")
    latex2sympy = require("latex2sympy2_extended", "accuracy_reward")
    # Answers are LaTeX. Boxed ones are preferred, and units are removed.
    latex_config = math_verify.LatexExtractionConfig(
        normalization_config=latex2sympy.NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    # math-verify limits time by signals, which only the main thread receives.
    in_main_thread = threading.current_thread() is threading.main_thread()
    parse_seconds = PARSE_SECONDS if in_main_thread else None
    verify_seconds = VERIFY_SECONDS if in_main_thread else None
    parsed_solution = math_verify.parse(solution, parsing_timeout=parse_seconds)
    if not parsed_solution:
        return Grade(None, UNPARSEABLE, SKIPPED)
    parsed_answer = math_verify.parse(
        answer,
        extraction_config=[latex_config],
        extraction_mode="first_match",
        parsing_timeout=parse_seconds,
    )
    is_correct = math_verify.verify(parsed_solution, parsed_answer, timeout_seconds=verify_seconds)
    return Grade(
        reward=float(is_correct),
        parsed_solution=str(parsed_solution),
        parsed_answer=str(parsed_answer) if parsed_answer else UNPARSEABLE,
    )
