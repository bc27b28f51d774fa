"""The check, before it is relied on, that shared decoding gives the model's own probabilities."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...models.layout_check import Comparison, Results, coarsest, read_plain_rows
from ...models.lm_head import HeadFinder
from ...models.quantized import working_precision
from ...models.readers import TokenReader
from ...models.unwrap import autocast_to, causal_model, current_autocast, evaluating
from ...types import Prompts, Sampling, TokenRows
from .shared_decoding import SharedDecoder

TOKENS = 4


def decoding_comparison(
    model: nn.Module, prompts: Prompts, sampling: Sampling, pad_id: int
) -> Comparison:
    """Compare log-probabilities of what two rows of the longest prompt write with plain rows."""
    causal = causal_model(model)
    longest = max(prompts.token_ids, key=len)
    return Comparison(
        "log-probabilities of decoding",
        length=len(longest),
        longest=len(longest) + sampling.max_tokens,
        autocast=partial(current_autocast, next(causal.parameters()).device),
        compute=lambda autocast: _results(causal, longest, sampling, pad_id, autocast),
    )


def _results(
    causal: Any, prompt: list[int], sampling: Sampling, pad_id: int, autocast: torch.dtype | None
) -> Results:
    head = HeadFinder(1.0).find(causal)
    assert head is not None
    few = sampling.replace(max_tokens=min(TOKENS, sampling.max_tokens), temperature=1.0)
    with evaluating(causal), autocast_to(next(causal.parameters()).device, autocast):
        # Different streams, so that the rows part.
        ids, logps = SharedDecoder(causal, head, few)([prompt] * 2, (0, 1))
    rows = TokenRows.of([(prompt, written) for written in ids])
    plain = read_plain_rows(causal, TokenReader(head), rows, pad_id, autocast)
    found: list[Tensor] = [torch.tensor(row, dtype=plain.dtype) for row in logps]
    packed = nn.utils.rnn.pad_sequence(found, batch_first=True).to(plain.device)
    return packed, plain, coarsest(working_precision(causal), autocast)
