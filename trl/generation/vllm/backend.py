"""Generation with vLLM: weight sync and its verification, for an engine here or on a server."""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ...imports import require
from ...models.weights import full_weights
from ...ops.torch_internals import version_counter
from ...types import Prefix, Prompts
from ..base import GenerationBackend, Generations, PolicyHandle, Sampling
from .engine import VLLMEngine
from .sampling import CompletionRequest, make_requests, read_outputs
from .weight_verifier import WeightSyncError, WeightVerifier

logger = logging.get_logger(__name__)
T = TypeVar("T")

# Lengths of the prompt and completion that compare log-probabilities of trainer and engine.
PROBE_PROMPT_TOKENS = 64
PROBE_COMPLETION_TOKENS = 16
# The mean difference per token in nats, by dtype, above which weights count as different.
LOGP_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass(eq=False)
class VLLMBackend(GenerationBackend):
    """Generates with vLLM, and verifies after each sync that the weights arrived.

    `generate` raises `WeightSyncError` if the engine does not hold the policy's weights.
    """

    policy: PolicyHandle
    context_length: int  # maximum tokens of prompt plus completion
    _: KW_ONLY
    # Yields name and full tensor of each weight to send. All ranks must iterate over all of it.
    weights: Callable[[nn.Module], Iterator[tuple[str, Tensor]]] = full_weights
    temperature: float = 1.0  # of `policy.logps`
    num_engines: int = 1
    probe_syncs: int = 0  # log-probabilities are compared once in this many syncs; 0: never

    def __post_init__(self) -> None:
        self._ranks = self.policy.ranks
        self._step = 0  # whose weights the next generation must use
        # Step and version of the weights that the engine holds; None: unknown.
        self._synced: tuple[int, int] | None = None
        self._num_syncs = 0
        self._needs_probe = False  # after a sync that is to be probed
        self._awake_depth = 0  # nested `awake` blocks
        self._metrics: list[tuple[str, float]] = []  # not taken yet

    def sync_weights(self, step: int) -> None:
        """Note which weights the next generation uses. They are sent when the engine is awake."""
        self._step = step

    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Complete every row; see `GenerationBackend`."""
        with self._ranks.fail_together("reading prompts"):
            for row, ids in enumerate(prompts.token_ids):
                if len(ids) >= self.context_length:
                    raise ValueError(
                        f"The prompt of row {row} ({prompts.messages[row]!r:.80}) has {len(ids)} "
                        f"tokens, but the vLLM engine's context is {self.context_length} tokens "
                        "for prompt and completion: raise vllm_max_model_length (of a server: "
                        "--max_model_len) or shorten the prompt."
                    )
        seeds = sampling.with_seeds(len(prompts)).seeds or ()
        with self.awake():
            self._probe(prompts.token_ids[0])
            started = time.perf_counter()
            generations = self._complete(prompts.prefixes, seeds, sampling)
            self._metrics.append(("vllm/generate_seconds", time.perf_counter() - started))
        return generations

    def take_metrics(self) -> list[tuple[str, float]]:
        """Return times of syncs and generation, and gaps of probes; see `GenerationBackend`."""
        metrics, self._metrics = self._metrics, []
        return metrics

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, the engine holds the policy's weights and has a KV cache."""
        self._awake_depth += 1
        try:
            if self._awake_depth == 1:
                self._wake("weights")
                self._send_if_changed()
                self._wake("kv_cache")
            yield
        finally:
            self._awake_depth -= 1
            if self._awake_depth == 0:
                self._sleep()

    @abstractmethod
    def _send_weights(self, weights: Iterator[tuple[str, Tensor]]) -> str | None:
        """Send and verify weights, and drop cached prompts; return an error text, or None."""

    @abstractmethod
    def _gather_to_engine(self, value: T) -> tuple[list[T], int]:
        """Return the values of all ranks that share an engine, and this rank's index in them."""

    @abstractmethod
    def _run_requests(self, requests: list[CompletionRequest], sampling: Sampling) -> Generations:
        """Complete requests, distributed over the engines in turn.

        All ranks that share an engine call this with the same requests.
        """

    def _wake(self, part: str) -> None:
        """Allocate memory for a part of the engine, if it has sleep mode on."""

    def _sleep(self) -> None:
        """Free weights and KV cache, if the engine has sleep mode on."""

    def _complete(
        self, prefixes: Sequence[Prefix], seeds: tuple[int, ...], sampling: Sampling
    ) -> Generations:
        """Complete the rows of all ranks that share an engine; return those of this rank."""
        rows_of_ranks, rank = self._gather_to_engine((prefixes, seeds))
        all_prefixes: list[Prefix] = []
        all_seeds: list[int] = []
        for rank_prefixes, rank_seeds in rows_of_ranks:
            all_prefixes += rank_prefixes
            all_seeds += rank_seeds
        generations = self._run_requests(make_requests(all_prefixes, all_seeds), sampling)
        start = sum(len(rank_seeds) for _, rank_seeds in rows_of_ranks[:rank])
        own = slice(start, start + len(prefixes))
        return Generations(
            completion_ids=generations.completion_ids[own],
            finish_reasons=generations.finish_reasons[own],
            sampling_logps=(generations.sampling_logps or [])[own],
        )

    def _weights_version(self) -> int:
        """Return a number that changes when a weight is modified."""
        return sum(version_counter(parameter) for parameter in self.policy.model.parameters())

    def _send_if_changed(self) -> None:
        if self._ranks.all(self._synced == (self._step, self._weights_version())):
            return
        started = time.perf_counter()
        self._synced = None
        with torch.no_grad():
            problem = self._send_weights(self.weights(self.policy.model))
            self._raise_on_all_ranks(problem)
        self._synced = (self._step, self._weights_version())
        self._needs_probe = self.probe_syncs > 0 and self._num_syncs % self.probe_syncs == 0
        self._num_syncs += 1
        self._metrics.append(("vllm/sync_seconds", time.perf_counter() - started))

    def _probe(self, prompt: list[int]) -> None:
        """After some syncs, compare log-probabilities of policy and engines on one completion."""
        if not self._needs_probe:
            return
        self._needs_probe = False
        # Ranks that share an engine must send the same request: use the first rank's prompt.
        prompts, _ = self._gather_to_engine(
            prompt[-min(PROBE_PROMPT_TOKENS, self.context_length - 1) :]
        )
        prompt = prompts[0]
        max_tokens = min(PROBE_COMPLETION_TOKENS, self.context_length - len(prompt))
        generations = self._run_requests(
            [CompletionRequest(prompt, 1, 0)] * self.num_engines,
            Sampling(max_tokens=max_tokens, temperature=self.temperature),
        )
        gaps = []
        for ids, engine_logps in zip(
            generations.completion_ids, generations.sampling_logps or [], strict=True
        ):
            policy_logps = self.policy.logps(prompt, ids)
            differences = [
                abs(engine_logp - policy_logp)
                for engine_logp, policy_logp in zip(engine_logps, policy_logps, strict=True)
            ]
            gaps.append(sum(differences) / len(ids))
        gap = max(gaps)
        self._metrics.append(("vllm/logp_gap", gap))
        tolerance = LOGP_TOLERANCES[self.policy.dtype]
        problem = None
        if not gap <= tolerance:  # also if it is NaN
            problem = (
                f"log-probabilities of a probe differ by {gap:.3g} nats a token, more than "
                f"{tolerance:g} in {self.policy.dtype}"
            )
        self._raise_on_all_ranks(problem)

    def _raise_on_all_ranks(self, problem: str | None) -> None:
        """Raise an error on all ranks if one has a problem. All ranks call it together."""
        failure = None
        if problem is not None:
            self._synced = None
            failure = WeightSyncError(
                f"Step {self._step}, rank {self._ranks.rank}: the vLLM engine does not hold the "
                f"weights of the policy: {problem}. Completions would come from another policy."
            )
        self._ranks.raise_everywhere(failure, "sending weights to vLLM")


class VLLMColocateBackend(VLLMBackend):
    """Generates with vLLM in this process; `tensor_parallel` ranks share an engine."""

    def __init__(
        self,
        engine: VLLMEngine,
        policy: PolicyHandle,
        *,
        tensor_parallel: int = 1,
        **options: Any,  # of `VLLMBackend`
    ):
        super().__init__(policy, engine.context_length, **options)
        self._engine = engine
        self._shares_engine = tensor_parallel > 1
        self._verifier = WeightVerifier(engine.model)
        engine.sleep()

    def _wake(self, part: str) -> None:
        self._engine.wake(part)

    def _sleep(self) -> None:
        if self._engine.sleep():
            self._synced = None

    def _send_weights(self, weights: Iterator[tuple[str, Tensor]]) -> str | None:
        for name, weight in weights:
            self._verifier.load(name, weight.detach().contiguous(), self._engine.load)
        self._engine.reset_prefix_cache()
        problem = self._verifier.finish_sync()
        if problem is None and self._verifier.warning:
            logger.warning_once(self._verifier.warning)
        return problem

    def _gather_to_engine(self, value: T) -> tuple[list[T], int]:
        if not self._shares_engine:
            return [value], 0
        group = require("vllm.distributed.parallel_state", "use_vllm=True").get_tp_group()
        values: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
        return values, group.rank_in_group

    def _run_requests(self, requests: list[CompletionRequest], sampling: Sampling) -> Generations:
        # Ranks that share an engine communicate inside, so they cannot be guarded.
        guard = nullcontext() if self._shares_engine else self._ranks.fail_together("generation")
        with guard:
            return read_outputs(requests, self._engine.generate(requests, sampling))
