"""The proof, before it is relied on, that shared decoding gives the model's own probabilities."""

from __future__ import annotations

from typing import Any

import torch

from ...models.autocast import autocast_to, coarsest, current_autocast, precisions_to_try
from ...models.kernel_proof import prove_kernels
from ...models.layout_check import (
    Sharing,
    disagreement,
    noted_attention,
    plain_log_probs,
    why_not_shared,
)
from ...models.lm_head import HeadFinder, OutputHead, causal_model, evaluating
from ...models.quantized import working_precision
from ...ops.masking import length_mask
from ...ops.oom import is_out_of_memory
from ...types import Prompts, Rollout, Sampling
from .shared_decoding import SharedDecoder

TOKENS = 4


class DecodingTrial:
    """Decides between shared and padded decoding.

    At the first use, and whenever prompts are twice as long as what was tried, two rows write a few
    tokens together; their log-probabilities must be those of plain rows, under autocast as well
    where it is on.

    Args:
        sharing (`Sharing`): holds the decision, and says it once.
        pad_id (`int`), device (`torch.device`): for the plain rows.
    """

    def __init__(self, sharing: Sharing, pad_id: int, device: torch.device):
        self._sharing = sharing
        self._pad_id = pad_id
        self._device = device
        self._tried_length = 0

    def allows(
        self, model: Any, head: OutputHead | None, prompts: Prompts, sampling: Sampling
    ) -> bool:
        """Whether the rows of `prompts` may decode on shared prefixes."""
        if not self._sharing.enabled:
            return False
        if head is None:
            self._sharing.say(model, "its output projection is unusual")
            return False
        longest = max(map(len, prompts.token_ids))
        reason = why_not_shared(model, longest + sampling.max_tokens)
        if reason is not None:
            self._sharing.say(model, reason)
        elif longest > 2 * self._tried_length:
            self._try(model, prompts, sampling)
            self._tried_length = longest
        return reason is None and self._sharing.enabled

    def _try(self, model: Any, prompts: Prompts, sampling: Sampling) -> None:
        causal = causal_model(model)
        try:
            difference = self._largest_difference(causal, prompts, sampling)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            self._sharing.refuse(model, f"decoding failed in a trial ({error})")
            return
        if difference is not None:
            words = f"log-probabilities of decoding differed by {difference:.2g} nats in a trial"
            self._sharing.refuse(model, words)

    def _largest_difference(
        self, causal: Any, prompts: Prompts, sampling: Sampling
    ) -> float | None:
        """A difference that rounding does not explain, if there is one."""
        head = HeadFinder(1.0).find(causal)
        assert head is not None
        row = max(prompts.token_ids, key=len)
        few = sampling.replace(max_tokens=min(TOKENS, sampling.max_tokens), temperature=1.0)
        for precision in precisions_to_try(causal, current_autocast(self._device)):
            difference = self._difference(causal, head, [row] * 2, few, precision)
            if difference is not None:
                return difference
        return None

    def _difference(
        self,
        causal: Any,
        head: OutputHead,
        rows: list[list[int]],
        few: Sampling,
        autocast: torch.dtype | None,
    ) -> float | None:
        precision = autocast_to(self._device, autocast)
        with evaluating(causal), precision, noted_attention(causal) as layers:
            # Different streams, so that the rows part.
            ids, logps = SharedDecoder(causal, head, few)(rows, (0, 1))
        prove_kernels(self._device, layers)
        wanted = plain_log_probs(causal, head, _as_rollout(rows, ids), self._pad_id, autocast)
        found = torch.zeros_like(wanted)
        for row, values in enumerate(logps):
            found[row, : len(values)] = torch.tensor(values, dtype=wanted.dtype)
        return disagreement(found, wanted, coarsest(working_precision(causal), autocast))


def _as_rollout(prompts: list[list[int]], completions: list[list[int]]) -> Rollout:
    lengths = torch.tensor([len(ids) for ids in completions])
    mask = length_mask(lengths, int(lengths.max()))
    return Rollout(
        prompt_ids=prompts,
        completion_ids=completions,
        row_ids=[0, 1],
        loss_mask=mask,
        num_loss_tokens=mask.sum(),
        num_loss_rows=torch.tensor(2),
    )
