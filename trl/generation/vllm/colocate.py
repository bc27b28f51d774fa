"""Generation by a vLLM engine in the training process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers.utils import logging

from ...models.policy_handle import PolicyHandle
from ...types import Generations, Sampling
from .backend import VLLMBackend
from .engine import VLLMEngine, gather_over_tensor_group
from .sampling import Request, read_outputs
from .weight_proof import WeightProof

logger = logging.get_logger(__name__)


class VLLMColocateBackend(VLLMBackend):
    """Generates with vLLM in this process.

    Args:
        engine (`VLLMEngine`): what generates.
        policy (`PolicyHandle`): whose weights it is to hold.
        tensor_parallel (`int`): ranks that hold one engine together.
        options: see `VLLMBackend`.
    """

    def __init__(
        self, engine: VLLMEngine, policy: PolicyHandle, *, tensor_parallel: int = 1, **options: Any
    ):
        super().__init__(policy, engine.context, **options)
        self._engine = engine
        self._is_alone = tensor_parallel == 1
        self._proof = WeightProof(engine.model)
        engine.sleep()

    def _wake(self, part: str) -> None:
        self._engine.wake(part)

    def _keeps_weights(self) -> bool:
        self._engine.sleep()
        return self._engine.has_weights

    def _send(self, weights: Iterator[tuple[str, Tensor]]) -> str | None:
        for name, weight in weights:
            self._proof.load(name, weight.detach().contiguous(), self._engine.load)
        self._engine.forget_prefixes()
        problem = self._proof.problem()
        if problem is None and not self._syncs and self._proof.doubt:
            logger.warning(self._proof.doubt)
        return problem

    def _shares(self, value: Any) -> tuple[list[Any], int]:
        return ([value], 0) if self._is_alone else gather_over_tensor_group(value)

    def _run(self, requests: list[Request], sampling: Sampling) -> Generations:
        if not self._is_alone:  # ranks that hold one engine meet inside
            return read_outputs(requests, self._engine.generate(requests, sampling))
        with self._ranks.fail_together("generation"):
            return read_outputs(requests, self._engine.generate(requests, sampling))
