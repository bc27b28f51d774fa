"""Generation with the policy itself, through `generate` of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList

from ..ops.masking import pad_ragged
from ..types import Generations, Prompts, Sampling
from ..wording import did_you_mean
from .base import cut_at_stop
from .sampler import RowSampler

NAMED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# They change how tokens are drawn, or hide how long a completion is.
REFUSED = (
    "num_beams",
    "num_return_sequences",
    "typical_p",
    "top_h",
    "epsilon_cutoff",
    "eta_cutoff",
    "stop_strings",
    "return_dict_in_generate",
)


def merge_extra(sampling: Sampling) -> tuple[Sampling, dict[str, Any]]:
    """Let `Sampling.extra` win over the named options.

    Returns:
        The sampling with its named options replaced, and the options left for the engine.

    Raises:
        ValueError: for an option that `generate` does not know or that is refused.
    """
    _check_names(sampling.extra)
    rest = dict(sampling.extra)
    named = {name: rest.pop(name) for name in NAMED if name in rest}
    if "max_new_tokens" in rest:
        named["max_tokens"] = rest.pop("max_new_tokens")
    return sampling.replace(extra={}, **named), rest


def _check_names(options: Mapping[str, Any]) -> None:
    known = set(GenerationConfig().to_dict())
    for name in options:
        if name in REFUSED:
            raise ValueError(f"generation_kwargs[{name!r}] cannot be used in training.")
        if name not in known and name not in NAMED:
            hint = did_you_mean(name, known | set(NAMED))
            raise ValueError(f"generation_kwargs[{name!r}] is no generation option.{hint}")


class TransformersBackend:
    """Generates a whole round in one padded call.

    Args:
        policy: returns a context manager that yields the bare policy in evaluation mode.
        pad_id (`int`): fills the padding on the left of prompts; masked.
        device (`torch.device`): where the policy lives.
        cache_implementation (`str`, *optional*): kind of key-value cache.
    """

    def __init__(
        self,
        policy: Callable[[], AbstractContextManager[Any]],
        *,
        pad_id: int,
        device: torch.device,
        cache_implementation: str | None = None,
    ):
        self._policy = policy
        self._pad_id = pad_id
        self._device = device
        self._cache_implementation = cache_implementation

    def sync_weights(self, step: int) -> None:
        """Nothing to do: the policy that trains is the one that generates."""

    @torch.no_grad()
    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Complete every row; see `GenerationBackend`."""
        sampling, rest = merge_extra(sampling)
        ids = pad_ragged(prompts.token_ids, self._pad_id, side="left")
        mask = pad_ragged([[1] * len(row) for row in prompts.token_ids], 0, side="left")
        processors = LogitsProcessorList()
        if rest.pop("do_sample", True):
            processors.append(RowSampler(_seeded(sampling, len(prompts)), ids.shape[1]))
        with self._policy() as model:
            output = model.generate(
                input_ids=ids.to(self._device),
                attention_mask=mask.to(self._device),
                generation_config=self._config(sampling, rest),
                logits_processor=processors,
            )
        rows = output[:, ids.shape[1] :].tolist()
        cut = [cut_at_stop(row, sampling.stop_ids, sampling.max_tokens) for row in rows]
        return Generations(
            completion_ids=[row for row, _ in cut], finish=[reason for _, reason in cut]
        )

    def _config(self, sampling: Sampling, rest: dict[str, Any]) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            do_sample=False,
            pad_token_id=self._pad_id,
            eos_token_id=list(sampling.stop_ids) or None,
            repetition_penalty=sampling.repetition_penalty,
            cache_implementation=self._cache_implementation,
            use_cache=True,
            disable_compile=True,
            **rest,
        )


def _seeded(sampling: Sampling, count: int) -> Sampling:
    if sampling.seeds is not None:
        return sampling
    return sampling.replace(seeds=tuple(torch.randint(2**62, (count,)).tolist()))
