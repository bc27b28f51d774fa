"""Generation with the policy itself, through the continuous batching of transformers."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
)

from ...distributed import Ranks
from ...memory.progress import finish
from ...memory.random_numbers import preserve_rng_state
from ...models.patches import attention_implementation, forward_below_autocast
from ...models.sharded import replaced_forward
from ...models.unwrap import causal_model
from ...suggestions import did_you_mean
from ...types import Prompts
from ..base import GenerationBackend, Generations, Sampling, generations_from_rows
from .sampler import RowSampler

DEFAULT_CACHE_FRACTION = 0.5  # of the free memory of a GPU
STOP_SECONDS = 30.0
TokenRows = Sequence[Sequence[int]]


class RequestState(Protocol):
    """What `_ContinuousSampler` reads of the engine's state of a request."""

    request_id: str
    position_offset: int  # tokens of prompt and completion so far


@dataclass(eq=False)
class ContinuousBackend(GenerationBackend):
    """Generates with the policy; rows enter and leave the running batch one by one.

    Each row samples from its own random stream, as with `TransformersBackend`, so its completion
    does not depend on the other rows. The policy keeps its mode. Its forward runs in the dtype of
    the weights, without autocast.
    """

    policy: Callable[[], AbstractContextManager[Any]]  # yields it unwrapped, in evaluation mode
    _: KW_ONLY
    pad_id: int
    options: Mapping[str, Any] | None = None  # fields of `transformers.ContinuousBatchingConfig`
    ranks: Ranks = field(default_factory=Ranks)  # all processes; an error on one fails all

    def __post_init__(self) -> None:
        legal = [option.name for option in fields(ContinuousBatchingConfig)]
        for name in self.options or ():
            if name not in legal:
                raise ValueError(
                    f"transformers_continuous_batching_config[{name!r}] is not an option of "
                    f"ContinuousBatchingConfig.{did_you_mean(name, legal)}"
                )

    @torch.no_grad()
    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Complete every row. ValueError: an option that continuous batching does not support."""
        refused = set(sampling.extra) - {"do_sample"}
        if sampling.repetition_penalty != 1.0:
            refused.add("repetition_penalty")
        if refused:
            raise ValueError(
                f"{', '.join(sorted(refused))}: continuous batching does not support "
                "this; leave it out, or set use_transformers_continuous_batching=False."
            )
        sampling = sampling.with_seeds(len(prompts))
        with (
            self.policy() as policy,
            self.ranks.fail_together("generation"),
            preserve_rng_state(),  # the engine seeds torch's generators
        ):
            model: PreTrainedModel = causal_model(policy)
            forward = forward_below_autocast(model)
            # The engine's cache takes keys in the dtype of the weights, so autocast is bypassed.
            with nullcontext() if forward is None else replaced_forward(model, forward):
                rows = self._generate(model, prompts.token_ids, sampling)
        return generations_from_rows(rows, sampling)

    def _generate(
        self, model: PreTrainedModel, prompts: TokenRows, sampling: Sampling
    ) -> list[list[int]]:
        """Start an engine, complete the prompts, and stop it; the model is left unchanged."""
        attention = attention_implementation(model.config)
        request_ids = [f"row {row}" for row in range(len(prompts))]
        manager = None
        try:
            manager = model.init_continuous_batching(
                generation_config=GenerationConfig(
                    max_new_tokens=sampling.max_tokens,
                    do_sample=False,
                    pad_token_id=self.pad_id,
                    eos_token_id=list(sampling.stop_ids) or -1,
                ),
                continuous_batching_config=self._config(model.device, prompts, sampling.max_tokens),
            )
            prompt_lengths = dict(zip(request_ids, map(len, prompts), strict=True))
            sampler = _ContinuousSampler(sampling, prompt_lengths, model.device)
            if sampling.extra.get("do_sample", True):
                processors = manager.logit_processor
                processors.logits_processor.append(sampler)
                processors.tensors_required += 1
                processors.do_processing = True
            if model.device.type == "cuda":
                manager.warmup()
            for request_id, ids in zip(request_ids, prompts, strict=True):
                manager.add_request(list(ids), request_id=request_id)
            manager.start()
            completions = _collect(manager, len(prompts))
            sampler.row_sampler.check()
            return [completions[request_id] for request_id in request_ids]
        finally:
            if manager is not None:
                manager.stop(block=True, timeout=STOP_SECONDS)
                manager.destroy()
            if attention_implementation(model.config) != attention:
                model.set_attn_implementation(attention)

    def _config(
        self, device: torch.device, prompts: TokenRows, max_tokens: int
    ) -> ContinuousBatchingConfig:
        """Return the user's options. On a CPU, the default cache holds all rows."""
        config = ContinuousBatchingConfig(**(self.options or {}))
        if device.type != "cpu":
            if config.num_blocks is None and config.max_memory_percent is None:
                config.max_memory_percent = DEFAULT_CACHE_FRACTION
            return config
        if config.num_blocks is None:
            row_blocks = [math.ceil((len(ids) + max_tokens) / config.page_size) for ids in prompts]
            config.num_blocks = 1 + len(row_blocks) + sum(row_blocks)
        if config.max_batch_tokens is None:
            config.max_batch_tokens = max(len(prompts), max(map(len, prompts)))
        return config


def _collect(manager: Any, num_requests: int) -> dict[str, list[int]]:
    """Wait for all requests and return their token ids by request id.

    `manager` is a `ContinuousBatchingManager` of transformers.
    """
    completions: dict[str, list[int]] = {}
    while len(completions) < num_requests:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                error = manager.background_thread_status.fatal_error
                raise RuntimeError(
                    f"Continuous batching ended before all rows were complete: {error}"
                )
        elif result.error is not None:
            raise RuntimeError(f"Continuous batching failed: {result.error}")
        elif result.is_finished():
            completions[result.request_id] = list(result.generated_tokens)
            finish(1)
    return completions


class _ContinuousSampler(ContinuousBatchingLogitsProcessor):
    """Samples with a `RowSampler`, which needs to know the row and position of each new token.

    Both are passed through the engine as one number, row * max_tokens + position.
    """

    supported_kwargs: dict[str, type] = {}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, sampling: Sampling, prompt_lengths: Mapping[str, int], device: torch.device):
        self.row_sampler = RowSampler(sampling, device)
        self._max_tokens = sampling.max_tokens
        self._prompt_lengths = prompt_lengths  # by request id
        self._rows = {request_id: row for row, request_id in enumerate(prompt_lengths)}

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Give requests that only warm the engine up the row after the last one."""
        int32_tensor.fill_(len(self._rows) * self._max_tokens)

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        """Return row * max_tokens + position for each request."""
        numbers = [self._number(request.state) for request in requests_with_new_token]
        return torch.tensor(numbers, dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Return scores (B, V): 0 for the sampled tokens, -inf for others."""
        numbers = tensor_arg[: scores.shape[0]].long()
        rows = numbers // self._max_tokens
        positions = numbers % self._max_tokens
        return self.row_sampler.mask_unsampled(scores, rows, positions)

    def _number(self, state: RequestState) -> int:
        row = self._rows.get(state.request_id)
        if row is None:
            return len(self._rows) * self._max_tokens
        position = state.position_offset - self._prompt_lengths[state.request_id]
        # The engine may ask for one token more than it keeps.
        return row * self._max_tokens + min(position, self._max_tokens - 1)
