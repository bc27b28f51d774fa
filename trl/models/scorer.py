"""Log-probabilities of completions: the one place that decides what layout a model sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.logprobs import token_log_probs, token_statistics
from ..ops.masking import length_mask, pad_ragged
from ..types import Rollout, TokenScores


class PlainScorer:
    """Scores padded rows: prompts padded on the left, completions on the right.

    Args:
        pad_id (`int`): fills the padding; masked, so its value does not matter.
        temperature (`float`): divides the logits, as it did when the tokens were sampled.
        device (`torch.device`): where the model lives.
        pad_multiple (`int`, *optional*): pad both widths to a multiple of this.
        router_logits (`bool`): ask a mixture-of-experts model for its load-balancing loss.
    """

    def __init__(
        self,
        *,
        pad_id: int,
        temperature: float,
        device: torch.device,
        pad_multiple: int | None = None,
        router_logits: bool = False,
    ):
        self.pad_id = pad_id
        self.temperature = temperature
        self.device = device
        self.pad_multiple = pad_multiple
        self.router_logits = router_logits

    def __call__(
        self, model: Callable[..., Any], batch: Rollout, with_entropy: bool = False
    ) -> TokenScores:
        """Score every completion token of `batch` under `model`.

        Args:
            model: a causal language model, wrapped for distributed training or not.
            batch (`Rollout`): B rows; only its token ids are read.
            with_entropy (`bool`): also return the entropy of each next-token distribution.

        Returns:
            `TokenScores`: (B, C) tensors, 0 beyond a completion's end.
        """
        inputs, completions, exists = self._layout(batch)
        width = completions.shape[1]
        if self.router_logits:
            inputs["output_router_logits"] = True
        output = model(**inputs, logits_to_keep=width + 1, use_cache=False)
        logits = output.logits[:, -(width + 1) : -1]
        columns = batch.loss_mask.shape[1]
        entropies = None
        if with_entropy:
            logps, entropies = token_statistics(logits, completions, self.temperature)
            entropies = entropies.masked_fill(~exists, 0.0)[:, :columns]
        else:
            logps = token_log_probs(logits, completions, self.temperature)
        return TokenScores(
            logps=logps.masked_fill(~exists, 0.0)[:, :columns],
            entropies=entropies,
            aux_loss=output.aux_loss if self.router_logits else None,
        )

    @torch.no_grad()
    def logps(self, model: nn.Module, batch: Rollout, rows: int) -> Tensor:
        """Score without gradient, in evaluation mode, at most `rows` rows at a time: (B, C)."""
        was_training = model.training
        model.eval()
        try:
            pieces = torch.zeros(batch.loss_mask.shape, device=self.device)
            for start in range(0, len(batch), rows):
                piece = batch.select(range(start, min(start + rows, len(batch))))
                scored = self(model, piece).logps
                pieces[start : start + len(piece), : scored.shape[1]] = scored
            return pieces
        finally:
            model.train(was_training)

    def _layout(self, batch: Rollout) -> tuple[dict[str, Any], Tensor, Tensor]:
        prompts = pad_ragged(batch.prompt_ids, self.pad_id, side="left", multiple=self.pad_multiple)
        # One column at least, so that rows with empty completions still make a valid input.
        width = max(1, batch.loss_mask.shape[1])
        completions = pad_ragged(
            batch.completion_ids, self.pad_id, width=width, multiple=self.pad_multiple
        )
        prompt_lengths = torch.tensor([len(ids) for ids in batch.prompt_ids])
        lengths = torch.tensor([len(ids) for ids in batch.completion_ids])
        exists = length_mask(lengths, completions.shape[1])
        prompt_mask = length_mask(prompt_lengths, prompts.shape[1]).flip(1)
        attention = torch.cat([prompt_mask, exists], 1).long()
        inputs = {
            "input_ids": torch.cat([prompts, completions], 1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        }
        inputs = {name: value.to(self.device) for name, value in inputs.items()}
        return inputs, completions.to(self.device), exists.to(self.device)
