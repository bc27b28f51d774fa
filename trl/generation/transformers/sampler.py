"""Sampling of tokens with a random stream per row."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..base import Generations, Sampling


class NonFiniteLogitsError(RuntimeError):
    """The model's logits are NaN or infinite for some rows, so no token can be sampled."""

    def __init__(self, rows: Sequence[int]):
        self.rows = list(rows)
        row_list = ", ".join(map(str, self.rows[:8]))
        if len(self.rows) > 8:
            row_list += ", ..."
        super().__init__(
            f"Generation: the model's logits of row {row_list} are NaN or infinite, so no token "
            "can be sampled. Check the weights and the precision of the computation."
        )


def logits_warpers(sampling: Sampling) -> LogitsProcessorList:
    """Return the logits filters of `sampling`, in the order in which transformers applies them."""
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


def uniform_draws(seeds: Sequence[int], count: int) -> Tensor:
    """Draw `count` numbers in [0, 1) for each seed, from a generator of its own: (B, count)."""
    draws = torch.empty(len(seeds), count, dtype=torch.float64)
    for row, seed in enumerate(seeds):
        draws[row].uniform_(generator=torch.Generator().manual_seed(seed))
    return draws


def sample_tokens(scores: Tensor, draws: Tensor) -> Tensor:
    """Sample a token (B,) from filtered logits (B, V) by inverting the CDF at draws (B,) in [0, 1).

    The result is some legal id where logits are NaN: an error on an accelerator would end the
    process.
    """
    cumulative = scores.float().softmax(-1).double().cumsum(-1)
    targets = draws.to(cumulative.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    return tokens.clamp(max=scores.shape[-1] - 1)


class RowSampler(LogitsProcessor):
    """Samples the next token of each row with the row's own random numbers.

    It makes greedy decoding sample: it samples a token and masks all others. The tokens of a row
    depend on its own logits and seed alone, whatever else is in the batch. There are B seeds, one
    per row; what is sampled as row B, such as a request that warms the engine up, is not checked.
    """

    def __init__(self, sampling: Sampling, device: torch.device, prompt_width: int = 0):
        self._prompt_width = prompt_width
        self._warpers = logits_warpers(sampling)
        seeds = (*(sampling.seeds or ()), 0)
        self._draws = uniform_draws(seeds, sampling.max_tokens).to(device)
        # Tokens of each row with bad logits. Counted on the device, so only `check` waits for it.
        self._bad = torch.zeros(len(self._draws), dtype=torch.int32, device=device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = torch.arange(len(scores), device=scores.device)
        return self.mask_unsampled(scores, rows, input_ids.shape[1] - self._prompt_width)

    def mask_unsampled(self, scores: Tensor, rows: Tensor, positions: Tensor | int) -> Tensor:
        """Sample a token from each row of logits (b, V); return scores: 0 for it, -inf for others.

        `rows` (b,) are the row indices of the logits, and `positions` (b,) or a number the index of
        the sampled token in its completion.
        """
        self._bad.index_add_(0, rows, (~scores.amax(-1).isfinite()).int())  # NaN, inf, or all -inf
        filtered = self._warpers(None, scores)  # none of the filters reads input ids
        tokens = sample_tokens(filtered, self._draws[rows, positions])
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)

    def check(self) -> None:
        """Raise `NonFiniteLogitsError` if logits of a row were NaN or infinite."""
        rows = self._bad[:-1].nonzero().flatten().tolist()
        if rows:
            raise NonFiniteLogitsError(rows)


class RepetitionPenalty(RepetitionPenaltyLogitsProcessor):
    """The penalty of transformers, without the padding: before 5.23 transformers penalizes it."""

    def __init__(self, penalty: float, padding: Tensor):
        super().__init__(penalty)
        self._padding = padding[:, None]  # (B, 1) columns of left padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        # A repeated token is penalized once, so a copy of the row's last token can replace padding.
        seen = torch.where(columns < self._padding, input_ids[:, -1:], input_ids)
        return super().__call__(seen, scores)


class StopStrings(StoppingCriteria):
    """Ends a completion at the token that completes a stop string, and records its length there."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        strings: str | Sequence[str],
        prompt_width: int,
    ):
        self._contains_string = StopStringCriteria(tokenizer, strings)
        self._prompt_width = prompt_width
        self._lengths: Tensor | int = 0  # (B,) tokens up to the first stop string; 0: none yet

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        completion_ids = input_ids[:, self._prompt_width :]
        is_stopped = self._contains_string(completion_ids, scores)
        lengths = torch.as_tensor(self._lengths, device=is_stopped.device)
        is_new = (lengths == 0) & is_stopped
        self._lengths = torch.where(is_new, completion_ids.shape[1], lengths)
        return is_stopped

    def cut(self, generations: Generations) -> Generations:
        """Truncate each completion after its first stop string."""
        completion_ids = list(generations.completion_ids)
        finish_reasons = list(generations.finish_reasons)
        for row, length in enumerate(torch.as_tensor(self._lengths).tolist()):
            if 0 < length <= len(completion_ids[row]):
                completion_ids[row] = completion_ids[row][:length]
                finish_reasons[row] = "stop"
        return dataclasses.replace(
            generations, completion_ids=completion_ids, finish_reasons=finish_reasons
        )
