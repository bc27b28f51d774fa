"""The output projection in float32, whatever the precision of the rest of the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class Float32Linear(nn.Linear):
    """A linear layer that computes in float32 even inside autocast."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Project hidden states (..., H) to float32 logits (..., V)."""
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.float())


def cast_head_to_float32(model: PreTrainedModel) -> None:
    """Make the output projection of `model` compute in float32, outside of autocast.

    With tied weights the embedding becomes float32 too; its output is cast back, so the layers
    see the precision they were loaded in.

    Args:
        model (`PreTrainedModel`): a causal language model; changed in place.

    Raises:
        ValueError: if the model has no output projection, or it carries an adapter.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError("cast_lm_head_to_fp32=True: the model has no output projection.")
    if type(head) is not nn.Linear:
        raise ValueError(
            "cast_lm_head_to_fp32=True cannot be used with an adapter or quantization on the "
            "output projection; take it out of target_modules."
        )
    embedding = model.get_input_embeddings()
    dtype = head.weight.dtype
    tied = embedding.weight is head.weight
    head.to(torch.float32)
    if tied:
        embedding.weight = head.weight
        embedding.register_forward_hook(lambda module, args, output: output.to(dtype))
    head.__class__ = Float32Linear
