"""Generation by a vLLM engine in the training process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.utils import logging

from ..distributed import Ranks
from ..types import Generations, Prompts, Sampling
from .vllm_engine import VLLMEngine, gather_over_tensor_group
from .vllm_sampling import (
    Request,
    check_lengths,
    make_requests,
    read_outputs,
    row_seeds_of,
)
from .weight_proof import WeightProof, WeightSyncError

logger = logging.get_logger(__name__)

PROBE_PROMPT, PROBE_TOKENS = 64, 16
# Nats by which a token's log-probability may differ on average between trainer and engine.
BOUNDS = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Policy:
    """What the backend reads of the policy that trains.

    Args:
        weights: yields (name, whole tensor) of each weight, under its name in a checkpoint;
            all ranks go through it together.
        stamp: changes when a weight does.
        logps: log-probabilities of a completion after a prompt, each given as token ids; all
            ranks ask for them together.
        temperature: what they are computed at.
    """

    weights: Callable[[], Iterable[tuple[str, Tensor]]]
    stamp: Callable[[], object]
    logps: Callable[[list[int], list[int]], list[float]]
    temperature: Callable[[], float] = lambda: 1.0


class VLLMColocateBackend:
    """Generates with vLLM in this process, and proves after each sync that weights arrived.

    Args:
        engine (`VLLMEngine`): what generates.
        policy (`Policy`): whose weights it is to hold.
        ranks (`Ranks`, *optional*): all processes, which then fail together.
        tensor_parallel (`int`): ranks that hold one engine together.
        probe_syncs (`int`): log-probabilities are compared at each of so many syncs; 0: never.
        report: called as `report(name, value)` with each metric.

    Raises:
        WeightSyncError: while generating, if the engine does not hold the policy's weights.
    """

    reports_policy_logps = False

    def __init__(
        self,
        engine: VLLMEngine,
        policy: Policy,
        *,
        ranks: Ranks | None = None,
        tensor_parallel: int = 1,
        probe_syncs: int = 0,
        report: Callable[[str, float], None] = lambda name, value: None,
    ):
        self._engine = engine
        self._policy = policy
        self._ranks = ranks or Ranks()
        self._tensor_parallel = tensor_parallel
        self._probe_syncs = probe_syncs
        self._report = report
        self._proof = WeightProof(engine.model)
        self._wanted = 0
        self._held: tuple[int, object] | None = None  # step and stamp of the weights it holds
        self._syncs = 0
        self._probed = 0  # number of the sync that was probed last
        self._depth = 0
        engine.sleep()

    @property
    def context(self) -> int:
        """Most tokens that the engine sees of a prompt with its completion."""
        return self._engine.context

    def sync_weights(self, step: int) -> None:
        """Note which weights are to generate next; they are loaded once the engine is awake."""
        self._wanted = step

    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Complete every row; see `GenerationBackend`."""
        with self._ranks.together("reading prompts"):
            check_lengths(prompts, self._engine.context)
        seeds = row_seeds_of(sampling, len(prompts))
        with self.awake(prompts.token_ids[0]):
            started = time.perf_counter()
            found = self._complete(prompts.token_ids, seeds, sampling)
            self._report("vllm/generate_seconds", time.perf_counter() - started)
        return found

    @contextmanager
    def awake(self, probe: list[int] | None = None) -> Iterator[None]:
        """Inside, the engine holds the policy's weights and a cache; outside, maybe neither.

        One inside another changes nothing, so several generations need one sync.

        Args:
            probe: prompt whose completion's log-probabilities may be compared after a sync.
        """
        engine = self._engine
        self._depth += 1
        try:
            if self._depth == 1:
                engine.wake("weights")
                self._load_if_moved()
                engine.wake("kv_cache")
            if probe is not None:
                self._probe(probe)
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                engine.sleep()
                self._held = self._held if engine.has_weights else None

    # --- Weights ---

    def _load_if_moved(self) -> None:
        if self._ranks.all(self._held == (self._wanted, self._policy.stamp())):
            return
        started = time.perf_counter()
        self._held = None
        with torch.no_grad():
            for name, weight in self._policy.weights():
                self._proof.load(name, weight.detach().contiguous(), self._engine.load)
        self._engine.forget_prefixes()
        self._stop_at(self._proof.problem())
        self._held = (self._wanted, self._policy.stamp())
        self._syncs += 1
        if self._syncs == 1 and self._proof.unproven:
            logger.warning(
                f"vLLM converts {len(self._proof.unproven)} weights while loading, such as "
                f"{self._proof.unproven[0]}; only log-probabilities prove that they arrived."
            )
        self._report("vllm/sync_seconds", time.perf_counter() - started)

    def _probe(self, prompt: list[int]) -> None:
        """Compare log-probabilities of policy and engine, at the first sync and then at some."""
        due = self._probe_syncs and (self._syncs - 1) % self._probe_syncs == 0
        if not due or self._probed == self._syncs:
            return
        self._probed = self._syncs
        room = self._engine.context - 1
        request = Request(prompt[-min(PROBE_PROMPT, room) :], 1, 0)
        few = Sampling(
            max_tokens=min(PROBE_TOKENS, room + 1 - len(request.token_ids)),
            temperature=self._policy.temperature(),
        )
        found = self._run([request], few)
        (ids,), (logps,) = found.completion_ids, found.sampling_logps or [[]]
        expected = self._policy.logps(request.token_ids, ids)
        gaps = [abs(a - b) for a, b in zip(logps, expected, strict=True)]
        gap, bound = sum(gaps) / len(gaps), BOUNDS[self._engine.dtype]
        self._report("vllm/logp_gap", gap)
        words = (
            f"log-probabilities of a probe differ by {gap:.3g} nats a token, more than {bound:g} "
            f"in {self._engine.dtype}"
        )
        self._stop_at(None if gap <= bound else words)

    def _stop_at(self, problem: str | None) -> None:
        """Stop all ranks together if there is a problem on one."""
        failure = None
        if problem is not None:
            self._held = None
            failure = WeightSyncError(
                f"Step {self._wanted}, rank {self._ranks.rank}: the vLLM engine does not hold the "
                f"weights of the policy: {problem}. Completions would be those of another policy."
            )
        self._ranks.raise_together(failure, "sending weights to vLLM")

    # --- Requests ---

    def _complete(
        self, token_ids: list[list[int]], seeds: tuple[int, ...], sampling: Sampling
    ) -> Generations:
        """Complete the rows of this rank, or of all ranks that hold the engine together."""
        if self._tensor_parallel == 1:
            with self._ranks.together("generation"):
                return self._run(make_requests(token_ids, seeds), sampling)
        shares, place = gather_over_tensor_group((token_ids, seeds))
        every_id = [ids for share, _ in shares for ids in share]
        every_seed = [seed for _, share in shares for seed in share]
        found = self._run(make_requests(every_id, every_seed), sampling)
        start = sum(len(share) for share, _ in shares[:place])
        own = slice(start, start + len(token_ids))
        return Generations(
            completion_ids=found.completion_ids[own],
            finish=found.finish[own],
            sampling_logps=(found.sampling_logps or [])[own],
        )

    def _run(self, requests: list[Request], sampling: Sampling) -> Generations:
        return read_outputs(requests, self._engine.generate(requests, sampling))
