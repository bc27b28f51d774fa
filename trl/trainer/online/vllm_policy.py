"""What vLLM reads of a trainer, wherever the engine runs: sampling, precision, prompts, policy."""

from __future__ import annotations

from typing import Any

import torch
from datasets import IterableDataset
from torch import nn
from transformers.utils import logging

from ...generation.vllm.backend import Policy
from ...generation.vllm.engine import sampling_fields
from ...generation.vllm.sampling import merge_options
from ...models.quantized import working_precision
from ...models.weights import full_weights
from ...ops.masking import length_mask
from ...types import Rollout, Sampling
from .online_config import OnlineConfig

logger = logging.get_logger(__name__)

SEARCHED_ROWS = 100_000  # of the dataset, for a long prompt


def settle_sampling(args: OnlineConfig, sampling: Sampling) -> Sampling:
    """Sampling as the engine takes it.

    Raises:
        ValueError: for an option in `generation_kwargs` that vLLM does not know.
    """
    extra = dict(sampling.extra)
    if args.vllm_structured_outputs_regex is not None:
        extra["structured_outputs"] = {"regex": args.vllm_structured_outputs_regex}
    return merge_options(sampling.replace(extra=extra), sampling_fields())


def compute_dtype(args: OnlineConfig, causal: nn.Module) -> torch.dtype:
    """The precision in which the policy computes, so that the engine does too."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else working_precision(causal)


def check_prompts(trainer: Any, context: int) -> None:
    """Look at the prompt with the most characters, before time is spent on the others.

    Raises:
        ValueError: if the engine has no room for it and one more token.
    """
    dataset, completion = trainer.train_dataset, trainer.args.max_completion_length
    if isinstance(dataset, IterableDataset):
        return
    prompts = dataset.select_columns("prompt")[:SEARCHED_ROWS]["prompt"]
    place = max(range(len(prompts)), key=lambda row: len(str(prompts[row])))
    length = len(trainer.encode([dataset[place]]).token_ids[0])
    words = (
        f"The prompt of row {place} of train_dataset has {length} tokens. With "
        f"max_completion_length={completion} that is more than the {context} that the vLLM engine "
        "sees"
    )
    if length >= context:
        raise ValueError(
            f"{words}, and leaves no room for a completion: raise vllm_max_model_length (of a "
            "server: --max_model_len) or leave out such prompts."
        )
    if length + completion > context:
        logger.warning(f"{words}: its completions are cut earlier.")


def policy_of(trainer: Any) -> Policy:
    """The weights and log-probabilities of a trainer's policy, whatever wraps it by then."""

    def stamp() -> int:
        return sum(p._version for p in trainer.model.parameters())

    def logps(prompt: list[int], completion: list[int]) -> list[float]:
        mask = length_mask(torch.tensor([len(completion)]), len(completion))
        batch = Rollout(
            prompt_ids=[prompt],
            completion_ids=[completion],
            row_ids=[0],
            loss_mask=mask.to(trainer.args.device),
            num_loss_tokens=mask.sum(),
            num_loss_rows=mask.any(1).sum(),
        )
        trainer.agree_on(batch)
        with trainer.accelerator.autocast():
            return trainer.scorer.logps(trainer.model, batch)[0].tolist()

    return Policy(
        weights=lambda: full_weights(trainer.model),
        stamp=stamp,
        logps=logps,
        temperature=lambda: trainer.scorer.temperature,
    )
