"""What generation with vLLM is, wherever the engine runs: sync, proof, requests."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...distributed import Ranks
from ...models.policy_handle import PolicyHandle
from ...models.weights import full_weights
from ...types import Generations, Prompts, Sampling
from ..base import GenerationBackend
from .sampling import Request, check_lengths, row_seeds_of
from .weight_proof import WeightSyncError

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
    temperature: float = 1.0

    @classmethod
    def of(cls, handle: PolicyHandle, temperature: float) -> Policy:
        """A policy, whatever wraps it by the time it is read."""
        return cls(
            weights=lambda: full_weights(handle.model),
            stamp=lambda: version_of(handle.model),
            logps=handle.logps,
            temperature=temperature,
        )


def version_of(model: nn.Module) -> int:
    """A number that changes when a weight does."""
    return sum(parameter._version for parameter in model.parameters())


class VLLMBackend(GenerationBackend):
    """Generates with vLLM, and proves after each sync that weights arrived.

    Args:
        policy (`Policy`): whose weights the engine is to hold.
        context (`int`): most tokens that the engine sees of a prompt with its completion.
        dtype (`torch.dtype`): in which it computes.
        ranks (`Ranks`, *optional*): all processes, which then fail together.
        probe_syncs (`int`): log-probabilities are compared at each of so many syncs; 0: never.
        report: called as `report(name, value)` with each metric.

    Raises:
        WeightSyncError: while generating, if the engine does not hold the policy's weights.
    """

    context: int

    def __init__(
        self,
        policy: Policy,
        context: int,
        dtype: torch.dtype,
        *,
        ranks: Ranks | None = None,
        probe_syncs: int = 0,
        report: Callable[[str, float], None] = lambda name, value: None,
    ):
        self._policy = policy
        self.context = context
        self._dtype = dtype
        self._ranks = ranks or Ranks()
        self._probe_syncs = probe_syncs
        self._report = report
        self._wanted = 0
        self._held: tuple[int, object] | None = None  # step and stamp of the weights it holds
        self._syncs = 0
        self._probed = 0  # number of the sync that was probed last
        self._depth = 0

    def sync_weights(self, step: int) -> None:
        """Note which weights are to generate next; they are sent once the engine is awake."""
        self._wanted = step

    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Complete every row; see `GenerationBackend`."""
        with self._ranks.together("reading prompts"):
            check_lengths(prompts, self.context)
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
        self._depth += 1
        try:
            if self._depth == 1:
                self._wake("weights")
                self._send_if_moved()
                self._wake("kv_cache")
            if probe is not None:
                self._probe(probe)
            yield
        finally:
            self._depth -= 1
            if not self._depth and not self._keeps_weights():
                self._held = None

    # --- What depends on where the engine runs ---

    @abstractmethod
    def _send(self) -> str | None:
        """Send all weights and drop cached prompts; returns what the proof finds wrong."""

    @abstractmethod
    def _complete(
        self, token_ids: list[list[int]], seeds: tuple[int, ...], sampling: Sampling
    ) -> Generations:
        """Complete the rows of this rank; all ranks call it together."""

    @abstractmethod
    def _complete_probe(
        self, prompt: list[int], sampling: Sampling
    ) -> tuple[list[int], Generations]:
        """Complete a prompt once on each engine that this rank is to check.

        Returns:
            The prompt, which may be another rank's, and a row from each engine.
        """

    def _wake(self, part: str) -> None:
        """Give memory to a part of the engine, if it is one that sleeps."""

    def _keeps_weights(self) -> bool:
        """Put the engine to sleep if it does so; whether it still holds its weights."""
        return True

    # --- Weights ---

    def _send_if_moved(self) -> None:
        if self._ranks.all(self._held == (self._wanted, self._policy.stamp())):
            return
        started = time.perf_counter()
        self._held = None
        with torch.no_grad():
            problem = self._send()
        self._stop_at(problem)
        self._held = (self._wanted, self._policy.stamp())
        self._syncs += 1
        self._report("vllm/sync_seconds", time.perf_counter() - started)

    def _probe(self, prompt: list[int]) -> None:
        """Compare log-probabilities of policy and engine, at the first sync and then at some."""
        due = self._probe_syncs and (self._syncs - 1) % self._probe_syncs == 0
        if not due or self._probed == self._syncs:
            return
        self._probed = self._syncs
        prompt = prompt[-min(PROBE_PROMPT, self.context - 1) :]
        few = Sampling(
            max_tokens=min(PROBE_TOKENS, self.context - len(prompt)),
            temperature=self._policy.temperature,
        )
        gap, bound = self._largest_gap(*self._complete_probe(prompt, few)), BOUNDS[self._dtype]
        self._report("vllm/logp_gap", gap)
        words = (
            f"log-probabilities of a probe differ by {gap:.3g} nats a token, more than {bound:g} "
            f"in {self._dtype}"
        )
        self._stop_at(None if gap <= bound else words)

    def _largest_gap(self, prompt: list[int], found: Generations) -> float:
        """Mean difference of a token's log-probability, of the row where it is largest."""
        means = []
        for ids, logps in zip(found.completion_ids, found.sampling_logps or [], strict=True):
            expected = self._policy.logps(prompt, ids)
            gaps = [abs(a - b) for a, b in zip(logps, expected, strict=True)]
            means.append(sum(gaps) / len(gaps))
        return max(means)

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


def probe_request(prompt: list[int]) -> Request:
    """What is asked of an engine that is probed."""
    return Request(prompt, 1, 0)


def rows_of_rank(found: Generations, shares: list[list[list[int]]], place: int) -> Generations:
    """This rank's rows of those of several ranks.

    Args:
        found (`Generations`): of all of them, in rank order.
        shares: the prompts of each rank.
        place (`int`): of this rank among them.
    """
    start = sum(len(share) for share in shares[:place])
    own = slice(start, start + len(shares[place]))
    return Generations(
        completion_ids=found.completion_ids[own],
        finish=found.finish[own],
        sampling_logps=(found.sampling_logps or [])[own],
    )
