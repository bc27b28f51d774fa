"""Generation by vLLM servers: rank 0 sends them weights and requests, for all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ....models.policy_handle import PolicyHandle
from ....types import Generations, Sampling
from ..backend import VLLMBackend
from ..sampling import Request
from .client import ServerError
from .server_pool import ServerPool


class VLLMServerBackend(VLLMBackend):
    """Generates with vLLM servers.

    Args:
        pool (`ServerPool`, *optional*): the servers, on rank 0.
        policy (`PolicyHandle`): whose weights they are to hold.
        context (`int`): most tokens that the servers see of a prompt with its completion.
        options: see `VLLMBackend`.

    Raises:
        ServerError: while generating, if a server is gone or silent.
    """

    def __init__(self, pool: ServerPool | None, policy: PolicyHandle, context: int, **options: Any):
        super().__init__(policy, context, **options)
        self._pool = pool

    @property
    def engines(self) -> int:
        """The servers; on other ranks than the first, which ask nothing, 1."""
        return 1 if self._pool is None else len(self._pool.servers)

    def _send(self, weights: Iterator[tuple[str, Tensor]]) -> str | None:
        """Send all weights; every rank goes through all of them, whatever happens on the way."""
        problem = failure = None
        try:
            if self._pool is None:
                for _ in weights:
                    pass
            else:
                problem = self._pool.send(weights, self._wanted)
        except ServerError as error:
            failure = error
        self._ranks.raise_everywhere(failure, "sending weights to vLLM")
        found: str | None = self._ranks.gather_objects(problem)[0]
        return found

    def _shares(self, value: Any) -> tuple[list[Any], int]:
        return self._ranks.gather_objects(value), self._ranks.rank

    def _run(self, requests: list[Request], sampling: Sampling) -> Generations:
        """What rank 0 is answered, on every rank; all fail together."""
        answer = None
        with self._ranks.fail_together("generation"):
            if self._pool is not None:
                answer = self._pool.complete(requests, sampling)
        found: Generations = self._ranks.gather_objects(answer)[0]
        return found
