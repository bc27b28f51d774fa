"""Drawing tokens with one random stream for each row."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..base import Generations, Sampling


class NonFiniteLogitsError(RuntimeError):
    """Tokens of some rows were to be drawn from logits that are NaN or infinite."""

    def __init__(self, rows: Sequence[int]):
        self.rows = list(rows)
        named = ", ".join(map(str, self.rows[:8])) + (", ..." if len(self.rows) > 8 else "")
        super().__init__(
            f"Generation: the model's logits of row {named} are NaN or infinite, so no token can "
            "be drawn. Check the weights, and the precision of the computation."
        )


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
        rows[row].uniform_(generator=torch.Generator().manual_seed(seed))
    return rows


def pick(scores: Tensor, draws: Tensor) -> Tensor:
    """Draw a token (B,) for each row by draws (B,) in [0, 1) and filtered logits (B, V)."""
    cumulative = scores.float().softmax(-1).double().cumsum(-1)
    targets = draws.to(cumulative.device)[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    # Some id where logits are NaN, for an error on an accelerator would end the process.
    return found.clamp(max=scores.shape[-1] - 1)


class RowDraws(LogitsProcessor):
    """Chooses the next token of each row with the row's own random numbers.

    Makes greedy decoding sample: scores are replaced by a choice already made. A row's tokens
    depend on its own scores and seed alone, whatever else is in the batch. There is a seed for each
    of B rows; what draws as row B, such as a request that warms an engine up, is never checked.
    """

    def __init__(self, sampling: Sampling, device: torch.device, prompt_width: int = 0):
        self._prompt_width = prompt_width
        self._warpers = warpers(sampling)
        self._draws = uniforms((*(sampling.seeds or ()), 0), sampling.max_tokens).to(device)
        # Counted on the device: nothing waits for it before `check`.
        self._bad = torch.zeros(len(self._draws), dtype=torch.int32, device=device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = torch.arange(len(scores), device=scores.device)
        return self.decide(scores, rows, input_ids.shape[1] - self._prompt_width)

    def decide(self, scores: Tensor, rows: Tensor, places: Tensor | int) -> Tensor:
        """Return scores (b, V) that are 0 at the tokens drawn, and -inf elsewhere.

        `rows` (b,) says whose logits they are, `places` which token of a completion is drawn.
        """
        self._bad.index_add_(0, rows, (~scores.amax(-1).isfinite()).int())  # NaN, inf, or all -inf
        # None of the filters reads the ids of the rows.
        chosen = pick(self._warpers(None, scores), self._draws[rows, places])
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen[:, None], 0.0)

    def check(self) -> None:
        """Raise `NonFiniteLogitsError` if a token was to be drawn from logits that are NaN."""
        rows = self._bad[:-1].nonzero().flatten().tolist()
        if rows:
            raise NonFiniteLogitsError(rows)


class RepetitionPenalty(RepetitionPenaltyLogitsProcessor):
    """The penalty of transformers, which before 5.23 takes padding for a token of the row."""

    def __init__(self, penalty: float, padding: Tensor):
        super().__init__(penalty)
        self._padding = padding[:, None]  # (B, 1) columns of padding in front of each row

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        # However often a row has a token, it counts once: its last one may stand for the padding.
        seen = torch.where(columns < self._padding, input_ids[:, -1:], input_ids)
        return super().__call__(seen, scores)


class StopTexts(StoppingCriteria):
    """Ends completions after the token that completes one of several texts, and knows where."""

    def __init__(self, tokenizer: Any, texts: str | Sequence[str], prompt_width: int):
        self._is_found = StopStringCriteria(tokenizer, texts)
        self._prompt_width = prompt_width
        self._lengths: Tensor | int = 0  # (B,) tokens up to the first text; 0 without

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        written = input_ids[:, self._prompt_width :]
        found = self._is_found(written, scores)
        known = torch.as_tensor(self._lengths, device=found.device)
        self._lengths = torch.where((known == 0) & found, written.shape[1], known)
        return found

    def cut(self, found: Generations) -> Generations:
        """Cut each completion after the first of the texts in it."""
        lengths = torch.as_tensor(self._lengths).tolist()
        rows = list(zip(found.completion_ids, found.finish, lengths, strict=True))
        return dataclasses.replace(
            found,
            completion_ids=[ids[: length or None] for ids, _, length in rows],
            finish=["stop" if 0 < n <= len(ids) else finish for ids, finish, n in rows],
        )
