"""Generation by vLLM servers: rank 0 sends them weights and requests, for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ....types import Generations, Sampling
from ..backend import Policy, VLLMBackend, probe_request, rows_of_rank
from ..sampling import requests_of_all
from .server_pool import Fleet

Answer = TypeVar("Answer")


class VLLMServerBackend(VLLMBackend):
    """Generates with vLLM servers.

    Args:
        fleet (`Fleet`, *optional*): the servers, on rank 0.
        policy (`Policy`): whose weights they are to hold.
        context (`int`): most tokens that the servers see of a prompt with its completion.
        dtype (`torch.dtype`): in which they compute.
        options: see `VLLMBackend`.

    Raises:
        ServerError: while generating, if a server is gone or silent.
    """

    def __init__(
        self,
        fleet: Fleet | None,
        policy: Policy,
        context: int,
        dtype: torch.dtype,
        **options: Any,
    ):
        super().__init__(policy, context, dtype, **options)
        self._fleet = fleet

    def _send(self) -> str | None:
        """Send all weights; every rank goes through all of them, whatever happens on the way."""
        transfer = None if self._fleet is None else self._fleet.transfer(self._wanted)
        try:
            for name, weight in self._policy.weights():
                if transfer is not None:
                    transfer.add(name, weight)
        except BaseException:
            if transfer is not None:
                transfer.abandon()
            raise
        return self._by_first(
            lambda fleet: None if transfer is None else transfer.finish(), "sending weights to vLLM"
        )

    def _complete_probe(
        self, prompt: list[int], sampling: Sampling
    ) -> tuple[list[int], Generations]:
        def complete(fleet: Fleet) -> tuple[list[int], Generations]:
            return prompt, fleet.complete_on_each(probe_request(prompt), sampling)

        return self._by_first(complete, "generation")

    def _complete(
        self, token_ids: list[list[int]], seeds: tuple[int, ...], sampling: Sampling
    ) -> Generations:
        """Complete the rows of all ranks, and take those of this one."""
        shares = self._ranks.gather_objects((token_ids, seeds))
        found = self._by_first(
            lambda fleet: fleet.complete(requests_of_all(shares), sampling), "generation"
        )
        return rows_of_rank(found, [ids for ids, _ in shares], self._ranks.rank)

    def _by_first(self, work: Callable[[Fleet], Answer], what: str) -> Answer:
        """What rank 0 finds out, on every rank; all fail together."""
        answer, failure = None, None
        try:
            answer = None if self._fleet is None else work(self._fleet)
        except Exception as error:
            failure = error
        self._ranks.raise_together(failure, what)
        found: Answer = self._ranks.gather_objects(answer)[0]
        return found
