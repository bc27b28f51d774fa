"""Drawing tokens with one random stream for each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ...types import Sampling


class NonFiniteLogitsError(RuntimeError):
    """The logits that a token is drawn from are NaN or infinite.

    Args:
        rows: whose logits they are, counted in what was to be completed.
    """

    def __init__(self, rows: Sequence[int]):
        self.rows = list(rows)
        named = ", ".join(map(str, self.rows[:8])) + (", ..." if len(self.rows) > 8 else "")
        super().__init__(
            f"Generation: the model's logits of row {named} are NaN or infinite, so no token can "
            "be drawn. Look at the weights and at the precision they are computed in."
        )


def check_rows(is_bad: Tensor) -> None:
    """Raise if one of the marks (B,), set while tokens were drawn, says that logits were bad.

    Raises:
        NonFiniteLogitsError: naming the rows.
    """
    rows = [row for row, found in enumerate(is_bad.tolist()) if found]
    if rows:
        raise NonFiniteLogitsError(rows)


def without_choice(scores: Tensor) -> Tensor:
    """Mark the rows (B,) of logits (B, V) that are not a distribution: NaN, inf, or all -inf."""
    return ~scores.amax(-1).isfinite()


@contextmanager
def rows_from(start: int) -> Iterator[None]:
    """Let an error inside count its rows from those of a larger batch."""
    try:
        yield
    except NonFiniteLogitsError as error:
        raise NonFiniteLogitsError([start + row for row in error.rows]) from None


def warpers(sampling: Sampling) -> LogitsProcessorList:
    """The filters of `sampling`, in the order transformers applies them."""
    chain = LogitsProcessorList()
    if sampling.temperature != 1.0:
        chain.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(MinPLogitsWarper(sampling.min_p))
    return chain


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """Draw `count` numbers in [0, 1) for each row from its own generator: (B, count)."""
    rows = torch.empty(len(seeds), count, dtype=torch.float64)
    for row, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        rows[row].uniform_(generator=generator)
    return rows


def pick(scores: Tensor, draws: Tensor) -> Tensor:
    """Draw one token for each row by inverting the cumulative distribution.

    Args:
        scores (`Tensor` (B, V)): filtered logits; -inf marks impossible tokens.
        draws (`Tensor` (B,)): numbers in [0, 1).

    Returns:
        `Tensor` (B,): token ids in [0, V); never one of probability zero. Where scores are NaN it
        is some id, for an error on an accelerator would end the process: the caller must look.
    """
    cumulative = scores.float().softmax(-1).double().cumsum(-1)
    targets = draws.to(cumulative.device)[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    return found.clamp(max=scores.shape[-1] - 1)


class RowSampler(LogitsProcessor):
    """Replaces the scores by a choice already made, so that greedy decoding samples.

    A row's tokens depend on its own scores and seed alone, whatever else is in the batch.

    Args:
        sampling (`Sampling`): filters, and one seed for each row.
        prompt_width (`int`): columns of the padded prompts.
    """

    def __init__(self, sampling: Sampling, prompt_width: int):
        if sampling.seeds is None:
            raise ValueError("Sampling.seeds must hold one seed for each row.")
        self._warpers = warpers(sampling)
        self._draws = uniforms(sampling.seeds, sampling.max_tokens)
        self._prompt_width = prompt_width
        self.is_bad = torch.zeros(len(sampling.seeds), dtype=torch.bool)  # see `check_rows`

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = input_ids.shape[1] - self._prompt_width
        self._draws = self._draws.to(scores.device)
        self.is_bad = self.is_bad.to(scores.device) | without_choice(scores)
        chosen = pick(self._warpers(input_ids, scores), self._draws[:, place])
        decided = torch.full_like(scores, -torch.inf)
        return decided.scatter_(1, chosen[:, None], 0.0)
