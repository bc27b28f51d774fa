"""Drawing tokens with one random stream for each row."""

from __future__ import annotations

from collections.abc import Sequence

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

from ..types import Sampling


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
        `Tensor` (B,): token ids; never one of probability zero.
    """
    cumulative = scores.float().softmax(-1).double().cumsum(-1)
    targets = draws.to(cumulative.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1)


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

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = input_ids.shape[1] - self._prompt_width
        chosen = pick(self._warpers(input_ids, scores), self._draws[:, place])
        decided = torch.full_like(scores, -torch.inf)
        return decided.scatter_(1, chosen[:, None], 0.0)
