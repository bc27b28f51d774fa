"""Generation by vLLM servers: rank 0 sends weights to all, and deals out all ranks' requests."""

import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ....suggestions import did_you_mean
from ...base import Generations, PolicyHandle, Sampling
from ..backend import VLLMBackend
from ..sampling import Request, completion_body, read_responses
from ..weight_verifier import WeightSyncError
from .client import (
    HOW,
    ServerError,
    ServerFacts,
    VLLMClient,
    incompatibilities,
    run_in_background,
    run_in_threads,
)
from .secret import WEIGHTS
from .weight_stream import TransferError, WeightGroup, batches

logger = logging.get_logger(__name__)

LAST_WORDS_SECONDS = 1.0  # seconds in which a server may say why it received no more
MOST_REQUESTS = 256  # under way at once, each in a thread; the others wait for one of these


class Server(VLLMClient):
    """A server that is ready, and was started for training; `facts` are what it reports."""

    def __init__(self, url: str, seconds: float):
        super().__init__(url, seconds)
        self.wait_until_healthy()
        try:
            self.facts = ServerFacts(**self.call_workers("trl_describe")[0])
        except TypeError as error:
            words = "runs another version of trl: install the same one on both sides."
            raise ServerError(f"The vLLM server {self.url} {words}") from error
        except ServerError as error:
            if error.status != 500:
                raise
            words = f"cannot take a trainer's weights. {HOW} It said: {error}"
            raise ServerError(f"The vLLM server {self.url} {words}") from error

    def check(self, wanted: ServerFacts, sampling: Sampling) -> None:
        """Refuse a server that a policy cannot be trained with, or that lacks a sampling option."""
        for reason in incompatibilities(self.facts, wanted):
            raise ValueError(f"The vLLM server {self.url} cannot be used. {reason}")
        extra = set(sampling.extra) - {"do_sample"}
        if not extra:
            return  # the schema takes long
        schema = self.request_with_retries("GET", "/openapi.json")["components"]["schemas"]
        legal = set(schema["CompletionRequest"]["properties"])
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
        self.context = min(server.facts.context for server in servers)  # tokens that all see
        self.run = uuid.uuid4().hex
        self._syncs = 0
        self._has_joined = False
        self._group: WeightGroup | None = None  # where weights go from GPU to GPU
        self._device = torch.device("cpu")  # from which they go

    def join(self, device: torch.device) -> None:
        """Let the workers of all servers take the weights of this run, and of no other."""
        size = 1 + sum(server.facts.workers for server in self.servers)
        identity, rank, calls = None, 1, []
        if device.type == "cuda" and all(server.facts.gpu is not None for server in self.servers):
            self._device = device
            self._group = WeightGroup(0, size, device, self.seconds, None)
            identity = self._group.identity
        for server in self.servers:
            # A worker that waits in vain is to be free before the next trainer gives it up.
            words = "trl_join", self.run, identity, (rank, size), self.seconds / 2
            calls.append(run_in_background(partial(server.call_workers, *words)))
            rank += server.facts.workers
        with _reasons(calls) as check:
            if self._group is not None:
                self._group.wait_for_all(check)
        _finish(calls)
        self._has_joined = True

    def send(self, weights: Iterable[tuple[str, Tensor]], step: int) -> str | None:
        """Send the weights of an optimizer step; returns what is then wrong, in words, or None."""
        failed = f"While sending the weights of step {step}, "
        if not self._has_joined:
            raise ServerError(f"{failed}the servers were left after a failure")
        self._syncs += 1
        calls: list[Future[Any]] = []
        sent, where = 0, "before the first weight"
        try:
            for batch in batches(weights, self._device):
                words = "POST", WEIGHTS, batch.packed(self.run)
                _finish(calls)  # servers take a batch while the next one is made
                where = f"at {batch.name}, after {sent} weights"
                calls = [run_in_background(partial(each.ask, *words)) for each in self.servers]
                with _reasons(calls) as check:
                    if self._group is not None:
                        self._group.broadcast(batch.flat, check)
                sent += len(batch.headers)
            _finish(calls)
            where = f"after the last of {sent} weights"
            return self._prove()
        except BaseException as error:
            self.leave()
            if isinstance(error, (ServerError, TransferError)):
                raise ServerError(f"{failed}{where}: {error}") from error
            raise

    def _prove(self) -> str | None:
        """What is wrong with what a server holds; if nothing is, cached prompts are dropped."""
        words = "trl_prove", self.run, self._syncs
        calls = [run_in_background(partial(server.call_workers, *words)) for server in self.servers]
        for problem, doubt in [each for workers in _finish(calls) for each in workers]:
            if problem is not None:
                return problem
            if doubt is not None:
                logger.warning_once(doubt)
        for server in self.servers:
            server.reset_prefix_cache()
        return None

    def leave(self) -> None:
        """Leave the workers and end all requests, after a failure."""
        self._has_joined = False
        if self._group is not None:
            self._group.close()
            self._group = None
        for server in self.servers:
            server.close()

    def complete(self, requests: Sequence[Request], sampling: Sampling) -> Generations:
        """Complete prompts, dealt out to the servers in turn."""

        def ask(server: Server, request: Request) -> Any:
            body = completion_body(request, sampling, self.context)
            return server.request_with_retries("POST", "/v1/completions", body, math.inf)

        pairs = zip(cycle(self.servers), requests, strict=False)
        works = [partial(ask, server, request) for server, request in pairs]
        calls = run_in_threads(works, MOST_REQUESTS)
        try:
            self._wait_for(calls)
            for server in self.servers:
                if server.call_workers("trl_held")[0] != [self.run, self._syncs]:
                    raise WeightSyncError(
                        f"The vLLM server {server.url} does not hold the weights that it was sent: "
                        "it was restarted or serves another trainer. Completions would be those of "
                        "another policy."
                    )
        except BaseException:
            self.leave()
            raise
        return read_responses(requests, [call.result() for call in calls])

    def _wait_for(self, calls: Sequence[Future[Any]]) -> None:
        """Wait for answers as long as the engines of all servers are alive."""
        pending = set(calls)
        try:
            while pending:
                done, pending = wait(pending, self.seconds / 2, FIRST_EXCEPTION)
                _raise_from(done)
                for server in self.servers if pending else ():
                    # A busy engine answers between two steps.
                    server.call_workers("trl_held", seconds=self.seconds / 2)
        except ServerError as error:
            answered = sum(call.done() and call.exception() is None for call in calls)
            raise ServerError(
                f"While generating, with {answered} of {len(calls)} prompts answered: {error}"
            ) from error


class VLLMServerBackend(VLLMBackend):
    """Generates with vLLM servers; rank 0 has the pool of them, the others none."""

    def __init__(self, pool: ServerPool | None, policy: PolicyHandle, **options: Any):
        context = policy.ranks.gather_objects(None if pool is None else pool.context)[0]
        engines = 1 if pool is None else len(pool.servers)  # other ranks ask nothing
        super().__init__(policy, context, engines=engines, **options)
        self._pool = pool

    def _send(self, weights: Iterator[tuple[str, Tensor]]) -> str | None:
        """Send all weights; every rank goes through all of them, whatever happens on the way."""
        problem = failure = None
        remaining = iter(weights)
        try:
            if self._pool is not None:
                problem = self._pool.send(remaining, self._wanted)
        except ServerError as error:
            failure = error
        for _ in remaining:
            pass
        self._ranks.raise_everywhere(failure, "sending weights to vLLM")
        return self._ranks.gather_objects(problem)[0]

    def _gather_to_engine(self, value: Any) -> tuple[list[Any], int]:
        return self._ranks.gather_objects(value), self._ranks.rank

    def _run(self, requests: list[Request], sampling: Sampling) -> Generations:
        """What rank 0 is answered, on every rank; all fail together."""
        answer: Any = None
        with self._ranks.fail_together("generation"):
            if self._pool is not None:
                answer = self._pool.complete(requests, sampling)
        return self._ranks.gather_objects(answer)[0]


def _raise_from(calls: Iterable[Future[Any]]) -> None:
    for call in calls:
        if call.done():
            call.result()


def _finish(calls: Sequence[Future[Any]]) -> list[Any]:
    """What all calls return, or what the first one that fails raises."""
    wait(calls, return_when=FIRST_EXCEPTION)
    _raise_from(calls)
    return [call.result() for call in calls]


@contextmanager
def _reasons(calls: Sequence[Future[Any]]) -> Iterator[Callable[[], None]]:
    """Raise what a server itself says of a transfer that breaks, if it says so soon."""
    try:
        yield partial(_raise_from, calls)
    except TransferError:
        wait(calls, LAST_WORDS_SECONDS, FIRST_EXCEPTION)
        _raise_from(calls)
        raise
