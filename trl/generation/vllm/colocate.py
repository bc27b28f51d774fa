"""Generation by a vLLM engine in the training process."""

from __future__ import annotations

from typing import Any

from transformers.utils import logging

from ...types import Generations, Sampling
from .backend import Policy, VLLMBackend, probe_request, rows_of_rank
from .engine import VLLMEngine, gather_over_tensor_group
from .sampling import Request, make_requests, read_outputs, requests_of_all
from .weight_proof import WeightProof

logger = logging.get_logger(__name__)


class VLLMColocateBackend(VLLMBackend):
    """Generates with vLLM in this process.

    Args:
        engine (`VLLMEngine`): what generates.
        policy (`Policy`): whose weights it is to hold.
        tensor_parallel (`int`): ranks that hold one engine together.
        options: see `VLLMBackend`.
    """

    def __init__(
        self, engine: VLLMEngine, policy: Policy, *, tensor_parallel: int = 1, **options: Any
    ):
        super().__init__(policy, engine.context, engine.dtype, **options)
        self._engine = engine
        self._tensor_parallel = tensor_parallel
        self._proof = WeightProof(engine.model)
        engine.sleep()

    def _wake(self, part: str) -> None:
        self._engine.wake(part)

    def _keeps_weights(self) -> bool:
        self._engine.sleep()
        return self._engine.has_weights

    def _send(self) -> str | None:
        for name, weight in self._policy.weights():
            self._proof.load(name, weight.detach().contiguous(), self._engine.load)
        self._engine.forget_prefixes()
        problem = self._proof.problem()
        if problem is None and not self._syncs and self._proof.doubt:
            logger.warning(self._proof.doubt)
        return problem

    def _complete_probe(
        self, prompt: list[int], sampling: Sampling
    ) -> tuple[list[int], Generations]:
        if self._tensor_parallel > 1:
            # Ranks that hold one engine must ask it for the same: all take what the first asks.
            (prompt, sampling), *_ = gather_over_tensor_group((prompt, sampling))[0]
        return prompt, self._run([probe_request(prompt)], sampling)

    def _complete(
        self, token_ids: list[list[int]], seeds: tuple[int, ...], sampling: Sampling
    ) -> Generations:
        """Complete the rows of this rank, or of all ranks that hold the engine together."""
        if self._tensor_parallel == 1:
            with self._ranks.together("generation"):
                return self._run(make_requests(token_ids, seeds), sampling)
        shares, place = gather_over_tensor_group((token_ids, seeds))
        found = self._run(requests_of_all(shares), sampling)
        return rows_of_rank(found, [ids for ids, _ in shares], place)

    def _run(self, requests: list[Request], sampling: Sampling) -> Generations:
        return read_outputs(requests, self._engine.generate(requests, sampling))
