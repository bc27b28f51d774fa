"""Generation with the policy itself, through the continuous batching of transformers."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
)

from ...distributed import Ranks
from ...models.patches import attention_implementation, forward_below_autocast
from ...models.sharded import replaced_forward
from ...models.unwrap import causal_model
from ...progress import finish
from ...random_numbers import preserve_rng_state
from ...suggestions import did_you_mean
from ...types import Prompts
from ..base import GenerationBackend, Generations, Sampling, cut_generations
from .sampler import RowDraws

CACHE_SHARE = 0.5  # of the free memory of a device, unless the options say otherwise
STOP_SECONDS = 30.0
Rows = Sequence[Sequence[int]]


@dataclass(eq=False)
class ContinuousBackend(GenerationBackend):
    """Generates with the policy; rows enter and leave the running batch one by one.

    Each row draws from its own random stream, as with `TransformersBackend`: what a row becomes
    does not depend on the rows it runs with. The policy keeps its mode and its precision. The
    forward runs in the dtype of the weights, without autocast.
    """

    policy: Callable[[], AbstractContextManager[Any]]  # yields it bare, in evaluation mode
    _: KW_ONLY
    pad_id: int  # of the configuration
    options: Mapping[str, Any] | None = None  # fields of `transformers.ContinuousBatchingConfig`
    ranks: Ranks = field(default_factory=Ranks)  # all processes, which then fail together

    def __post_init__(self) -> None:
        known = [each.name for each in fields(ContinuousBatchingConfig)]
        for name in self.options or ():
            if name not in known:
                raise ValueError(
                    f"transformers_continuous_batching_config[{name!r}] is not an option of "
                    f"ContinuousBatchingConfig.{did_you_mean(name, known)}"
                )

    @torch.no_grad()
    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Complete every row; options that continuous batching does not support are refused."""
        refused = set(sampling.extra) - {"do_sample"}
        if sampling.repetition_penalty != 1.0:
            refused.add("repetition_penalty")
        if refused:
            raise ValueError(
                f"{', '.join(sorted(refused))}: continuous batching does not support "
                "this; leave it out, or set use_transformers_continuous_batching=False."
            )
        sampling = sampling.seeded(len(prompts))
        with (
            self.policy() as policy,
            self.ranks.fail_together("generation"),
            preserve_rng_state(),  # the engine seeds torch's generators
        ):
            model: Any = causal_model(policy)
            forward = forward_below_autocast(model)
            # The engine's cache takes keys in the dtype of the weights.
            with nullcontext() if forward is None else replaced_forward(model, forward):
                rows = self._run(model, prompts.token_ids, sampling)
        return cut_generations(rows, sampling)

    def _run(self, model: Any, prompts: Rows, sampling: Sampling) -> list[list[int]]:
        """What an engine writes, which is then stopped; the model is left as it was."""
        attention, manager = attention_implementation(model.config), None
        names = [f"row {row}" for row in range(len(prompts))]
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
            lengths = dict(zip(names, map(len, prompts), strict=True))
            draws = _Draws(sampling, lengths, model.device)
            if sampling.extra.get("do_sample", True):
                processors = manager.logit_processor
                processors.logits_processor.append(draws)
                processors.tensors_required += 1
                processors.do_processing = True
            if model.device.type == "cuda":
                manager.warmup()
            for name, ids in zip(names, prompts, strict=True):
                manager.add_request(list(ids), request_id=name)
            manager.start()
            found = _collect(manager, len(prompts))
            draws.of_rows.check()
            return [found[name] for name in names]
        finally:
            if manager is not None:
                manager.stop(block=True, timeout=STOP_SECONDS)
                manager.destroy()
            if attention_implementation(model.config) != attention:
                model.set_attn_implementation(attention)

    def _config(self, device: torch.device, prompts: Rows, most: int) -> ContinuousBatchingConfig:
        """The options, with a cache that fits the rows where the device does not bound it."""
        config = ContinuousBatchingConfig(**(self.options or {}))
        if device.type != "cpu":
            if config.num_blocks is None and config.max_memory_percent is None:
                config.max_memory_percent = CACHE_SHARE
            return config
        if config.num_blocks is None:
            pages = [math.ceil((len(ids) + most) / config.page_size) for ids in prompts]
            config.num_blocks = 1 + len(pages) + sum(pages)
        if config.max_batch_tokens is None:
            config.max_batch_tokens = max(len(prompts), max(map(len, prompts)))
        return config


def _collect(manager: Any, count: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    while len(found) < count:
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
            found[result.request_id] = list(result.generated_tokens)
            finish(1)
    return found


class _Draws(ContinuousBatchingLogitsProcessor):
    """Gives a request the random number of its row and of the place of its new token."""

    supported_kwargs: dict[str, type] = {}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, sampling: Sampling, prompts: Mapping[str, int], device: torch.device):
        self.of_rows = RowDraws(sampling, device)
        self._width = sampling.max_tokens
        self._lengths = prompts  # of the prompts, by the names of the requests
        self._first = {name: row * self._width for row, name in enumerate(prompts)}
        self._no_row = len(prompts) * self._width

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Requests that only warm the engine up come after all rows."""
        int32_tensor.fill_(self._no_row)

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        """Which number each request takes, counted through all rows."""
        return torch.tensor(
            [self._number(request.state) for request in requests_with_new_token], dtype=torch.int32
        )

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Return scores (B, V) that are 0 at the tokens drawn, and -inf elsewhere."""
        numbers = tensor_arg[: scores.shape[0]].long()
        return self.of_rows.decide(scores, numbers // self._width, numbers % self._width)

    def _number(self, state: Any) -> int:
        name = state.request_id
        if name not in self._first:
            return self._no_row
        # The engine may ask for one token more than it keeps.
        return self._first[name] + min(state.position_offset - self._lengths[name], self._width - 1)
