"""Generation by vLLM servers: rank 0 sends them weights and requests, for all ranks.

Weights go to all servers; requests are divided among them.
"""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import asdict, replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ....models.policy_handle import PolicyHandle
from ....text import did_you_mean
from ....types import Generations, Sampling
from ..backend import VLLMBackend
from ..sampling import Request, completion_body, read_answers
from ..weight_proof import WeightSyncError
from .client import HOW, ServerError, VLLMClient
from .compat import ServerFacts, refusals
from .meeting import Door, Meeting, TransferError, in_background, local_address
from .weight_stream import WeightGroup

logger = logging.get_logger(__name__)

LAST_WORDS_SECONDS = 1.0  # seconds in which a server may say why it received no more
MOST_REQUESTS = 256  # requests that are under way; a server queues them itself


class Server(VLLMClient):
    """A server that is ready, and was started for training.

    Args:
        url (`str`): its address.
        seconds (`float`): in which it must be ready, and answer.

    Attributes:
        facts (`ServerFacts`): what it is.

    Raises:
        ServerError: if it is not ready in time, or was not started for training.
        SecretError: if it does not share the secret.
    """

    def __init__(self, url: str, seconds: float):
        super().__init__(url, seconds)
        self.wait_until_healthy()
        self.facts = self._ask_facts()

    def _ask_facts(self) -> ServerFacts:
        try:
            return ServerFacts(**self.call_workers("trl_describe")[0])
        except TypeError:
            words = "runs another version of trl: install the same one on both sides."
        except ServerError as error:
            if error.status != 500:
                raise
            words = f"cannot take weights of a trainer. {HOW} It said: {error}"
        raise ServerError(f"The vLLM server {self.url} {words}")

    def check(self, wanted: ServerFacts, sampling: Sampling) -> None:
        """Refuse a server with which a policy cannot be trained; see `refusals`.

        Raises:
            ValueError: with the first reason, or naming a sampling option that it would not read.
        """
        for reason in refusals(self.facts, wanted):
            raise ValueError(f"The vLLM server {self.url} cannot be used. {reason}")
        extra = set(sampling.extra) - {"do_sample"}
        if not extra:
            return  # the schema takes long
        schema = self.ask_again("GET", "/openapi.json")["components"]["schemas"]
        legal = set(schema["CompletionRequest"]["properties"])
        for name in extra - legal:
            raise ValueError(
                f"generation_kwargs[{name!r}] cannot be asked of a vLLM server."
                f"{did_you_mean(name, legal)}"
            )


class ServerPool:
    """All servers of a run.

    Args:
        servers: at least one.
    """

    def __init__(self, servers: Sequence[Server]):
        self.servers = servers
        self.seconds = servers[0].seconds
        self.run = uuid.uuid4().hex
        self._syncs = 0
        self._group: WeightGroup | None = None

    @property
    def context(self) -> int:
        """Most tokens of a prompt with its completion that all servers see."""
        return min(server.facts.context for server in self.servers)

    # --- Weights ---

    def meet(self, port: int, device: torch.device) -> None:
        """Make a group with the workers of all servers, over which weights are sent.

        Args:
            port (`int`): on which this process listens for them.
            device (`torch.device`): of the policy.

        Raises:
            ServerError: if a worker does not come.
            TransferError: if the port is taken.
        """
        meeting = Meeting(
            address=local_address(self.servers[0].host, port),
            port=port,
            size=1 + sum(server.facts.workers for server in self.servers),
            seconds=self.seconds,
            run=self.run,
            on_gpu=device.type == "cuda" and all(s.facts.gpu is not None for s in self.servers),
        )
        door = Door(meeting, [local_address(server.host, port) for server in self.servers])
        calls, words, group = self._invite(meeting), None, None
        try:
            peers = door.wait_for_all(lambda: _raise_from(calls))
            group = WeightGroup(meeting, 0, peers, device)
        except RuntimeError as error:  # of NCCL
            words = str(error).splitlines()[0]
        wait(calls, self.seconds)
        _raise_from(calls)
        if words is not None:
            raise TransferError(f"The vLLM servers and the trainer did not meet: {words}")
        self._group = group

    def _invite(self, meeting: Meeting) -> list[Future[Any]]:
        calls, rank = [], 1
        for server in self.servers:
            own = replace(meeting, address=local_address(server.host, meeting.port))
            calls.append(_call(server, "trl_join", asdict(own), rank))
            rank += server.facts.workers
        return calls

    def send(self, weights: Iterable[tuple[str, Tensor]], step: int) -> str | None:
        """Send all weights of an optimizer step.

        Returns:
            What is wrong with what a server holds then, in words; None if nothing is.

        Raises:
            ServerError: if a server is gone or silent.
        """
        group, failed = self._group, f"While sending the weights of step {step}, "
        if group is None:
            raise ServerError(f"{failed}the servers were left after a failure")
        self._syncs += 1
        calls = [_call(server, "trl_receive", self.run, self._syncs) for server in self.servers]
        sent, where = 0, "before the first weight"
        try:
            for name, weight in weights:
                where = f"at {name}, after {sent} weights"
                group.send(name, weight)
                sent += 1
            where = f"after the last of {sent} weights"
            group.end()
            verdicts = group.answers()
            wait(calls, self.seconds)
            _raise_from(calls)
            for server in self.servers:
                server.forget_prefixes()
        except (ServerError, TransferError) as error:
            reason = _reason(calls, error)
            self.leave()
            raise ServerError(f"{failed}{where}: {reason}") from error
        except BaseException:
            self.leave()
            raise
        for _, doubt in verdicts[:1]:
            if doubt is not None:
                logger.warning(doubt)
        return next((problem for problem, _ in verdicts if problem is not None), None)

    def leave(self) -> None:
        """Leave the workers and end all requests, after a failure."""
        if self._group is not None:
            self._group.close()
            self._group = None
        for server in self.servers:
            server.close()

    # --- Requests ---

    def complete(self, requests: Sequence[Request], sampling: Sampling) -> Generations:
        """Complete prompts, dealt out to the servers in turn.

        Raises:
            ServerError: if a server is gone or silent.
            WeightSyncError: if one was restarted or serves another trainer.
        """
        turn = threading.BoundedSemaphore(MOST_REQUESTS)

        def ask(server: Server, request: Request) -> Any:
            body = completion_body(request, sampling, self.context)
            with turn:
                return server.ask_again("POST", "/v1/completions", body, math.inf)

        pairs = zip(cycle(self.servers), requests, strict=False)
        calls = [in_background(partial(ask, server, request)) for server, request in pairs]
        try:
            self._wait_for(calls)
            self._check_weights()
        except BaseException:
            self.leave()
            raise
        return read_answers(requests, [call.result() for call in calls])

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

    def _check_weights(self) -> None:
        for server in self.servers:
            if server.call_workers("trl_held")[0] != [self.run, self._syncs]:
                raise WeightSyncError(
                    f"The vLLM server {server.url} does not hold the weights that it was "
                    "sent: it was restarted or serves another trainer. Completions would be those "
                    "of another policy."
                )


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
        remaining = iter(weights)
        try:
            if self._pool is not None:
                problem = self._pool.send(remaining, self._wanted)
        except ServerError as error:
            failure = error
        for _ in remaining:
            pass
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


def _call(server: Server, method: str, *args: Any) -> Future[Any]:
    """Call a method that takes as long as weights do; others see to its deadline."""
    return in_background(lambda: server.call_workers(method, *args, seconds=math.inf))


def _raise_from(calls: Iterable[Future[Any]]) -> None:
    """Raise what a call that is done has raised."""
    for call in calls:
        if call.done():
            call.result()


def _reason(calls: Iterable[Future[Any]], error: Exception) -> BaseException:
    """What the server itself says, if it does so soon; a transfer only breaks."""
    done = wait(calls, LAST_WORDS_SECONDS, FIRST_EXCEPTION).done
    return next((failure for call in done if (failure := call.exception()) is not None), error)
