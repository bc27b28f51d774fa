"""Generation by vLLM servers: rank 0 sends them weights and requests, for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ....imports import require
from ....models.policy_handle import PolicyHandle
from ....models.unwrap import causal_model
from ....types import Generations, Sampling
from ..backend import Policy, VLLMBackend, probe_request, rows_of_rank
from ..sampling import requests_of_all
from .client import ServerError, VLLMClient
from .compat import PROTOCOL, ServerFacts, gpu_id, shape_of
from .server_pool import Server, ServerPool

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class ServerOptions:
    """Which servers generate.

    Args:
        addresses (`str`): one, or several with commas between.
        seconds (`float`): in which one must be ready, and answer.
        port (`int`): of this machine, to which their workers connect.
        completion (`int`): most tokens of a completion.
    """

    addresses: str
    seconds: float
    port: int
    completion: int

    @property
    def urls(self) -> list[str]:
        """The addresses, one by one."""
        return [url.strip() for url in self.addresses.split(",") if url.strip()]

    def check(self) -> None:
        """Check what can be known without a server.

        Raises:
            ValueError: for an address that cannot be used or is given twice.
        """
        if not self.urls or len(set(self.urls)) < len(self.urls):
            raise ValueError(
                f"vllm_server_base_url={self.addresses!r} must be an address such as "
                "http://localhost:8000, or several different ones with commas between."
            )
        if self.seconds <= 0:
            raise ValueError(f"vllm_server_timeout={self.seconds} must be above 0.")
        for url in self.urls:
            VLLMClient(url, self.seconds)


def connect(
    handle: PolicyHandle, options: ServerOptions, sampling: Sampling, **backend: Any
) -> VLLMServerBackend:
    """Connect a policy with its servers: wait for them, check that they fit, meet their workers.

    Args:
        handle (`PolicyHandle`): what generates.
        options (`ServerOptions`): where.
        sampling (`Sampling`): how it draws.
        backend: more options of `VLLMServerBackend`.

    Raises:
        ServerError: if a server is not ready in time, or was not started for training.
        TransferError: if weights cannot be sent.
        ValueError: if a server does not fit the policy.
    """
    ranks, pool = handle.ranks, None
    with ranks.together("connecting with vLLM servers"):
        if ranks.rank == 0:
            wanted = wanted_facts(handle, options.completion)
            pool = ServerPool([Server.connect(url, options.seconds) for url in options.urls])
            for server in pool.servers:
                server.check(wanted, sampling)
            pool.meet(options.port, handle.device)
    context = ranks.gather_objects(None if pool is None else pool.context)[0]
    policy = Policy.of(handle, sampling.temperature)
    return VLLMServerBackend(pool, policy, context, handle.dtype, ranks=ranks, **backend)


def wanted_facts(handle: PolicyHandle, completion: int) -> ServerFacts:
    """What a server must be for a policy whose completions have so many tokens."""
    return ServerFacts(
        protocol=PROTOCOL,
        vllm=require("vllm", "use_vllm=True").__version__,
        shape=shape_of(causal_model(handle.model).config),
        dtype=str(handle.dtype).removeprefix("torch."),
        context=completion + 1,
        logprobs_mode="processed_logprobs",
        workers=1,
        gpu=gpu_id(handle.device),
    )


class VLLMServerBackend(VLLMBackend):
    """Generates with vLLM servers.

    Args:
        pool (`ServerPool`, *optional*): the servers, on rank 0.
        policy (`Policy`): whose weights they are to hold.
        context (`int`): most tokens that the servers see of a prompt with its completion.
        dtype (`torch.dtype`): in which they compute.
        options: see `VLLMBackend`.

    Raises:
        ServerError: while generating, if a server is gone or silent.
    """

    def __init__(
        self,
        pool: ServerPool | None,
        policy: Policy,
        context: int,
        dtype: torch.dtype,
        **options: Any,
    ):
        super().__init__(policy, context, dtype, **options)
        self._pool = pool

    def _send(self) -> str | None:
        """Send all weights; every rank goes through all of them, whatever happens on the way."""
        weights, problem, failure = self._policy.weights(), None, None
        try:
            if self._pool is None:
                for _ in weights:
                    pass
            else:
                problem = self._pool.send(weights, self._wanted)
        except ServerError as error:
            failure = error
        self._ranks.raise_together(failure, "sending weights to vLLM")
        found: str | None = self._ranks.gather_objects(problem)[0]
        return found

    def _complete_probe(
        self, prompt: list[int], sampling: Sampling
    ) -> tuple[list[int], Generations]:
        def complete(pool: ServerPool) -> tuple[list[int], Generations]:
            return prompt, pool.complete_on_each(probe_request(prompt), sampling)

        return self._by_first(complete)

    def _complete(
        self, token_ids: list[list[int]], seeds: tuple[int, ...], sampling: Sampling
    ) -> Generations:
        """Complete the rows of all ranks, and take those of this one."""
        shares = self._ranks.gather_objects((token_ids, seeds))
        found = self._by_first(lambda pool: pool.complete(requests_of_all(shares), sampling))
        return rows_of_rank(found, [ids for ids, _ in shares], self._ranks.rank)

    def _by_first(self, work: Callable[[ServerPool], Answer]) -> Answer:
        """What rank 0 generates, on every rank; all fail together."""
        answer = None
        with self._ranks.together("generation"):
            answer = None if self._pool is None else work(self._pool)
        found: Answer = self._ranks.gather_objects(answer)[0]
        return found
