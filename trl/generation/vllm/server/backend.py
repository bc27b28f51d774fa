"""Generation by vLLM servers: rank 0 sends weights and distributes the requests of all ranks."""

import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.utils import logging

from ....suggestions import did_you_mean
from ...base import Generations, PolicyHandle, Sampling
from ..backend import VLLMBackend
from ..sampling import CompletionRequest, completion_body, read_responses
from ..weight_verifier import WeightSyncError
from .client import (
    START_HINT,
    ServerError,
    ServerFacts,
    VLLMClient,
    incompatibilities,
    run_in_background,
    run_in_threads,
)
from .secret import WEIGHTS_ROUTE
from .weight_stream import TransferError, WeightGroup, weight_batches

logger = logging.get_logger(__name__)
T = TypeVar("T")

ERROR_WAIT_SECONDS = 1.0  # after a failed transfer, for a server's own error
MAX_CONCURRENT_REQUESTS = 256  # each has a thread; others wait


class Server(VLLMClient):
    """A server that is ready, and was started for training; `facts` are what it reports."""

    def __init__(self, url: str, seconds: float):
        super().__init__(url, seconds)
        self.wait_until_healthy()
        try:
            self.facts = ServerFacts(**self.call_workers("trl_describe")[0])
        except TypeError as error:
            raise ServerError(
                f"The vLLM server {self.url} runs another version of trl: install the same one on "
                "both sides."
            ) from error
        except ServerError as error:
            if error.status != 500:
                raise
            raise ServerError(
                f"The vLLM server {self.url} cannot receive a trainer's weights. {START_HINT} It "
                f"said: {error}"
            ) from error

    def check(self, required: ServerFacts, sampling: Sampling) -> None:
        """Raise ValueError if the server does not fit a policy, or lacks a sampling option."""
        for problem in incompatibilities(self.facts, required):
            raise ValueError(f"The vLLM server {self.url} cannot be used. {problem}")
        extra = set(sampling.extra) - {"do_sample"}
        if not extra:
            return  # without the request, which is slow
        schemas = self.request_with_retries("GET", "/openapi.json")["components"]["schemas"]
        legal = set(schemas["CompletionRequest"]["properties"])
        for name in extra - legal:
            raise ValueError(
                f"generation_kwargs[{name!r}] is not an option of a vLLM server."
                f"{did_you_mean(name, legal)}"
            )


class ServerPool:
    """All servers of a run; at least one."""

    def __init__(self, servers: Sequence[Server]):
        self.servers = servers
        self.seconds = servers[0].seconds
        self.context_length = min(server.facts.context for server in servers)
        self.run_id = uuid.uuid4().hex
        self._num_syncs = 0
        self._has_joined = False
        self._group: WeightGroup | None = None  # None: weights are sent in messages
        self._device = torch.device("cpu")  # from which weights are sent

    def join(self, device: torch.device) -> None:
        """Let the workers of all servers receive the weights of this run, and of no other."""
        group_size = 1 + sum(server.facts.workers for server in self.servers)
        nccl_id = None
        if device.type == "cuda" and all(server.facts.gpu is not None for server in self.servers):
            self._device = device
            self._group = WeightGroup(0, group_size, device, self.seconds, None)
            nccl_id = self._group.nccl_id
        calls = []
        first_rank = 1
        for server in self.servers:
            # Half the time, so that a worker that waits in vain is free before a next trainer gives
            # up.
            join = partial(
                server.call_workers,
                "trl_join",
                self.run_id,
                nccl_id,
                (first_rank, group_size),
                self.seconds / 2,
            )
            calls.append(run_in_background(join))
            first_rank += server.facts.workers
        with _prefer_server_errors(calls) as check:
            if self._group is not None:
                self._group.wait_for_all(check)
        _results(calls)
        self._has_joined = True

    def send(self, weights: Iterable[tuple[str, Tensor]], step: int) -> str | None:
        """Send the weights of an optimizer step and verify them; return an error text, or None.

        Raises `ServerError` if the transfer fails.
        """
        error_prefix = f"While sending the weights of step {step}, "
        if not self._has_joined:
            raise ServerError(f"{error_prefix}the servers were disconnected after a failure")
        self._num_syncs += 1
        calls: list[Future[Any]] = []
        num_sent = 0
        progress = "before the first weight"
        try:
            for batch in weight_batches(weights, self._device):
                message = batch.to_message(self.run_id)
                _results(calls)  # servers receive a batch while the next one is made
                progress = f"at {batch.first_name}, after {num_sent} weights"
                calls = [
                    run_in_background(partial(server.request, "POST", WEIGHTS_ROUTE, message))
                    for server in self.servers
                ]
                with _prefer_server_errors(calls) as check:
                    if self._group is not None:
                        self._group.broadcast(batch.flat, check)
                num_sent += len(batch.headers)
            _results(calls)
            progress = f"after the last of {num_sent} weights"
            return self._verify()
        except BaseException as error:
            self.leave()
            if isinstance(error, (ServerError, TransferError)):
                raise ServerError(f"{error_prefix}{progress}: {error}") from error
            raise

    def _verify(self) -> str | None:
        """Let all workers verify their weights, then drop cached prompts.

        Returns an error text, or None.
        """
        calls = [
            run_in_background(
                partial(server.call_workers, "trl_prove", self.run_id, self._num_syncs)
            )
            for server in self.servers
        ]
        for worker_results in _results(calls):
            for problem, warning in worker_results:
                if problem is not None:
                    return problem
                if warning is not None:
                    logger.warning_once(warning)
        for server in self.servers:
            server.reset_prefix_cache()
        return None

    def leave(self) -> None:
        """Leave the process group and abort all requests, after a failure."""
        self._has_joined = False
        if self._group is not None:
            self._group.close()
            self._group = None
        for server in self.servers:
            server.close()

    def complete(self, requests: Sequence[CompletionRequest], sampling: Sampling) -> Generations:
        """Complete prompts, distributed over the servers in turn."""

        def request_completions(server: Server, request: CompletionRequest) -> Any:
            body = completion_body(request, sampling, self.context_length)
            return server.request_with_retries("POST", "/v1/completions", body, math.inf)

        functions = [
            partial(request_completions, server, request)
            for server, request in zip(cycle(self.servers), requests, strict=False)
        ]
        calls = run_in_threads(functions, MAX_CONCURRENT_REQUESTS)
        try:
            self._wait_for(calls)
            self._check_held_weights()
        except BaseException:
            self.leave()
            raise
        return read_responses(requests, [call.result() for call in calls])

    def _check_held_weights(self) -> None:
        for server in self.servers:
            if server.call_workers("trl_held")[0] != [self.run_id, self._num_syncs]:
                raise WeightSyncError(
                    f"The vLLM server {server.url} does not hold the weights that it was sent: "
                    "it was restarted or serves another trainer. Completions would be those of "
                    "another policy."
                )

    def _wait_for(self, calls: Sequence[Future[Any]]) -> None:
        """Wait for completions as long as the engines of all servers are alive."""
        pending = set(calls)
        try:
            while pending:
                done, pending = wait(pending, self.seconds / 2, FIRST_EXCEPTION)
                _raise_errors(done)
                if not pending:
                    break
                for server in self.servers:
                    # A busy engine answers between two steps.
                    server.call_workers("trl_held", seconds=self.seconds / 2)
        except ServerError as error:
            num_answered = sum(call.done() and call.exception() is None for call in calls)
            raise ServerError(
                f"While generating, with {num_answered} of {len(calls)} prompts answered: {error}"
            ) from error


class VLLMServerBackend(VLLMBackend):
    """Generates with vLLM servers; rank 0 has the pool of servers, other ranks None."""

    def __init__(
        self,
        pool: ServerPool | None,
        policy: PolicyHandle,
        **options: Any,  # of `VLLMBackend`
    ):
        own_length = None if pool is None else pool.context_length
        context_length = policy.ranks.gather_objects(own_length)[0]
        num_engines = 1 if pool is None else len(pool.servers)  # other ranks make no requests
        super().__init__(policy, context_length, num_engines=num_engines, **options)
        self._pool = pool

    def _send_weights(self, weights: Iterator[tuple[str, Tensor]]) -> str | None:
        """Send all weights. Every rank reads all of them, even after a failure."""
        problem = None
        failure = None
        remaining = iter(weights)
        try:
            if self._pool is not None:
                problem = self._pool.send(remaining, self._step)
        except ServerError as error:
            failure = error
        for _ in remaining:
            pass
        self._ranks.raise_everywhere(failure, "sending weights to vLLM")
        return self._ranks.gather_objects(problem)[0]

    def _gather_to_engine(self, value: T) -> tuple[list[T], int]:
        return self._ranks.gather_objects(value), self._ranks.rank

    def _run_requests(self, requests: list[CompletionRequest], sampling: Sampling) -> Generations:
        """Complete requests on rank 0, and return the result on every rank."""
        generations: Any = None
        with self._ranks.fail_together("generation"):
            if self._pool is not None:
                generations = self._pool.complete(requests, sampling)
        return self._ranks.gather_objects(generations)[0]


def _raise_errors(calls: Iterable[Future[Any]]) -> None:
    """Raise the error of a call that has failed."""
    for call in calls:
        if call.done():
            call.result()


def _results(calls: Sequence[Future[Any]]) -> list[Any]:
    """Wait for all calls and return their results; raise the first error at once."""
    wait(calls, return_when=FIRST_EXCEPTION)
    _raise_errors(calls)
    return [call.result() for call in calls]


@contextmanager
def _prefer_server_errors(calls: Sequence[Future[Any]]) -> Iterator[Callable[[], None]]:
    """Raise a server's own error instead of a `TransferError`, if it comes soon after.

    Yields a function that raises the error of a call that has failed.
    """
    try:
        yield partial(_raise_errors, calls)
    except TransferError:
        wait(calls, ERROR_WAIT_SECONDS, FIRST_EXCEPTION)
        _raise_errors(calls)
        raise
