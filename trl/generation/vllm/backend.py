"""Generation with vLLM: sync, proof and requests, for an engine in this process or elsewhere."""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ...imports import require
from ...models.weights import full_weights
from ...torch_internals import version_counter
from ...types import Prefix, Prompts
from ..base import GenerationBackend, Generations, PolicyHandle, Sampling
from .engine import VLLMEngine
from .sampling import Request, make_requests, read_outputs
from .weight_verifier import WeightSyncError, WeightVerifier

logger = logging.get_logger(__name__)

PROBE_PROMPT, PROBE_TOKENS = 64, 16
# Nats by which a token's log-probability may differ on average between trainer and engine.
BOUNDS = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass(eq=False)
class VLLMBackend(GenerationBackend):
    """Generates with vLLM, and proves after each sync that weights arrived.

    While it generates, a `WeightSyncError` says that the engine does not hold the policy's weights.
    """

    policy: PolicyHandle  # whose weights the engine is to hold
    context: int  # most tokens that the engine sees of a prompt with its completion
    _: KW_ONLY
    # Yields name and whole tensor of each weight to send; all ranks go through them together.
    weights: Callable[[nn.Module], Iterator[tuple[str, Tensor]]] = full_weights
    temperature: float = 1.0  # at which `policy.logps` are computed
    engines: int = 1  # that hold the weights
    probe_syncs: int = 0  # log-probabilities are compared at each of so many syncs; 0: never
    report: Callable[[str, float], None] = lambda name, value: None  # takes each metric

    def __post_init__(self) -> None:
        self._ranks = self.policy.ranks
        self._wanted = 0
        self._held: tuple[int, int] | None = None  # step and stamp of the weights it holds
        self._syncs = 0
        self._is_due = False  # whether the last sync is still to be probed
        self._depth = 0

    def sync_weights(self, step: int) -> None:
        """Note which weights are to generate next; they are sent once the engine is awake."""
        self._wanted = step

    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Complete every row; see `GenerationBackend`."""
        with self._ranks.fail_together("reading prompts"):
            for row, ids in enumerate(prompts.token_ids):
                if len(ids) >= self.context:
                    raise ValueError(
                        f"The prompt of row {row} ({prompts.messages[row]!r:.80}) has {len(ids)} "
                        f"tokens, but the engine sees only {self.context} with the completion: "
                        "raise vllm_max_model_length (of a server: --max_model_len) or shorten it."
                    )
        seeds = sampling.with_seeds(len(prompts)).seeds or ()
        with self.awake():
            self._probe(prompts.token_ids[0])
            started = time.perf_counter()
            found = self._complete(prompts.prefixes, seeds, sampling)
            self.report("vllm/generate_seconds", time.perf_counter() - started)
        return found

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, the engine holds the policy's weights and a cache; outside, maybe neither."""
        self._depth += 1
        try:
            if self._depth == 1:
                self._wake("weights")
                self._send_if_moved()
                self._wake("kv_cache")
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._sleep()

    @abstractmethod
    def _send(self, weights: Iterator[tuple[str, Tensor]]) -> str | None:
        """Send weights and drop cached prompts; returns what the proof finds wrong."""

    @abstractmethod
    def _gather_to_engine(self, value: Any) -> tuple[list[Any], int]:
        """The values of all ranks that ask an engine together, and this rank's place there."""

    @abstractmethod
    def _run(self, requests: list[Request], sampling: Sampling) -> Generations:
        """Complete requests, dealt out to the engines in turn; all ranks call it together."""

    def _wake(self, part: str) -> None:
        """Give memory to a part of the engine, if it is one that sleeps."""

    def _sleep(self) -> None:
        """Drop weights and cache, if the engine is one that sleeps."""

    def _complete(
        self, prefixes: list[Prefix], seeds: tuple[int, ...], sampling: Sampling
    ) -> Generations:
        """Complete the rows of all ranks that ask together, and take those of this one."""
        shares, place = self._gather_to_engine((prefixes, seeds))
        all_prefixes = [prefix for share, _ in shares for prefix in share]
        all_seeds = [seed for _, share in shares for seed in share]
        generations = self._run(make_requests(all_prefixes, all_seeds), sampling)
        start = sum(len(share) for share, _ in shares[:place])
        own = slice(start, start + len(prefixes))
        return Generations(
            completion_ids=generations.completion_ids[own],
            finish_reasons=generations.finish_reasons[own],
            sampling_logps=(generations.sampling_logps or [])[own],
        )

    def _stamp(self) -> int:
        """A number that changes when a weight does."""
        return sum(version_counter(parameter) for parameter in self.policy.model.parameters())

    def _send_if_moved(self) -> None:
        if self._ranks.all(self._held == (self._wanted, self._stamp())):
            return
        started = time.perf_counter()
        self._held = None
        with torch.no_grad():
            self._stop_at(self._send(self.weights(self.policy.model)))
        self._held = (self._wanted, self._stamp())
        self._is_due = self.probe_syncs > 0 and self._syncs % self.probe_syncs == 0
        self._syncs += 1
        self.report("vllm/sync_seconds", time.perf_counter() - started)

    def _probe(self, prompt: list[int]) -> None:
        """Compare log-probabilities of policy and engines, at the first sync and then at some."""
        if not self._is_due:
            return
        self._is_due = False
        # Ranks that ask an engine together must ask for the same: all take the first one's prompt.
        prompt = self._gather_to_engine(prompt[-min(PROBE_PROMPT, self.context - 1) :])[0][0]
        tokens = min(PROBE_TOKENS, self.context - len(prompt))
        few = Sampling(max_tokens=tokens, temperature=self.temperature)
        found = self._run([Request(prompt, 1, 0)] * self.engines, few)
        means = []  # of the differences of a row
        for ids, logps in zip(found.completion_ids, found.sampling_logps or [], strict=True):
            pairs = zip(logps, self.policy.logps(prompt, ids), strict=True)
            means.append(sum(abs(a - b) for a, b in pairs) / len(ids))
        gap, bound = max(means), BOUNDS[self.policy.dtype]
        self.report("vllm/logp_gap", gap)
        words = (
            f"log-probabilities of a probe differ by {gap:.3g} nats a token, more than {bound:g}"
        )
        self._stop_at(None if gap <= bound else f"{words} in {self.policy.dtype}")

    def _stop_at(self, problem: str | None) -> None:
        """Stop all ranks together if there is a problem on one."""
        failure = None
        if problem is not None:
            self._held = None
            failure = WeightSyncError(
                f"Step {self._wanted}, rank {self._ranks.rank}: the vLLM engine does not hold the "
                f"weights of the policy: {problem}. Completions would be those of another policy."
            )
        self._ranks.raise_everywhere(failure, "sending weights to vLLM")


class VLLMColocateBackend(VLLMBackend):
    """Generates with vLLM in this process; `tensor_parallel` ranks hold one engine together."""

    def __init__(
        self, engine: VLLMEngine, policy: PolicyHandle, *, tensor_parallel: int = 1, **options: Any
    ):
        super().__init__(policy, engine.context, **options)
        self._engine = engine
        self._is_alone = tensor_parallel == 1
        self._proof = WeightVerifier(engine.model)
        engine.sleep()

    def _wake(self, part: str) -> None:
        self._engine.wake(part)

    def _sleep(self) -> None:
        if self._engine.sleep():
            self._held = None

    def _send(self, weights: Iterator[tuple[str, Tensor]]) -> str | None:
        for name, weight in weights:
            self._proof.load(name, weight.detach().contiguous(), self._engine.load)
        self._engine.reset_prefix_cache()
        problem = self._proof.problem()
        if problem is None and self._proof.doubt:
            logger.warning_once(self._proof.doubt)
        return problem

    def _gather_to_engine(self, value: Any) -> tuple[list[Any], int]:
        if self._is_alone:
            return [value], 0
        group = require("vllm.distributed.parallel_state", "use_vllm=True").get_tp_group()
        found: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(found, value, group=group.cpu_group)
        return found, group.rank_in_group

    def _run(self, requests: list[Request], sampling: Sampling) -> Generations:
        # Ranks that hold one engine meet inside.
        with self._ranks.fail_together("generation") if self._is_alone else nullcontext():
            return read_outputs(requests, self._engine.generate(requests, sampling))
