"""Talking to a vLLM server: its routes, waiting that ends, and requests in the background."""

import hmac
import json
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import torch

from ....imports import major_minor
from .secret import ANSWER, CHALLENGE, REQUEST, VARIABLE, SignedRequest, digest, shared_secret

PROTOCOL = 4  # of trainer and workers; changes when they would not understand each other
SHAPE = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "tie_word_embeddings"),
)


@dataclass(frozen=True)
class ServerFacts:
    """What a server is, as one of its workers tells."""

    protocol: int  # `PROTOCOL` of its side
    vllm: str  # version
    shape: dict[str, Any]  # sizes of the model, by their names in its configuration
    dtype: str  # in which it computes
    context: int  # most tokens of a prompt with its completion
    logprobs_mode: str  # of which distribution log-probabilities are
    workers: int  # processes that take weights
    gpu: str | None  # of the worker; None: it is on a CPU


def model_shape(config: Any) -> dict[str, Any]:
    """What models must share for one to take the weights of the other."""
    text = config.get_text_config()
    return {name: getattr(text, name, None) for name in SHAPE}


def gpu_id(device: torch.device) -> str | None:
    """What tells a GPU from all others; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def incompatibilities(server: ServerFacts, wanted: ServerFacts) -> list[str]:
    """Why a policy, whose facts are `wanted`, cannot be trained with a server, in sentences."""
    shape = server.shape
    other = next((name for name, x in wanted.shape.items() if shape.get(name) != x), "")
    problems = {
        "It runs another version of trl: install the same one on both sides.": (
            server.protocol != wanted.protocol
        ),
        f"It runs vLLM {server.vllm} and the trainer {wanted.vllm}: install the same release on "
        "both sides.": major_minor(server.vllm) != major_minor(wanted.vllm),
        f"Its model has {other}={shape.get(other)} and the policy {wanted.shape.get(other)}: start "
        "it with the model that is trained (--model).": other != "",
        f"It computes in {server.dtype} and the policy in {wanted.dtype}: start it with --dtype "
        f"{wanted.dtype}.": server.dtype != wanted.dtype,
        f"Its log-probabilities are {server.logprobs_mode}: start it with --logprobs-mode "
        f"{wanted.logprobs_mode}.": server.logprobs_mode != wanted.logprobs_mode,
        f"It sees {server.context} tokens, but max_completion_length={wanted.context - 1} leaves "
        "no room for a prompt: start it with a larger --max_model_len.": (
            server.context < wanted.context
        ),
        "It runs on the GPU that trains: give it other devices (CUDA_VISIBLE_DEVICES), or use "
        "vllm_mode='colocate'.": server.gpu is not None and server.gpu == wanted.gpu,
    }
    return [text for text, holds in problems.items() if holds]


BUSY = (500, 502, 503)  # statuses after which an idempotent request is sent again
REFUSED = 401  # the status where the secret was not proven
PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds before each of these attempts
LOOKS = 0.25  # seconds between two looks at a server that is starting
HOW = "Start it with `trl vllm-serve`."
SAME_SECRET = f"Give {VARIABLE} the same value where it is started and where training is."


class ServerError(ConnectionError):
    """A vLLM server is gone, silent, or answered with an error, of which `status` tells."""

    def __init__(self, words: str, status: int | None = None):
        super().__init__(words)
        self.status = status


class SecretError(ServerError):
    """Server and trainer do not share a secret, or what answers is not a server for training."""


class VLLMClient:
    """One vLLM server, at an address such as http://localhost:8000, that answers in `seconds`."""

    def __init__(self, url: str, seconds: float):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            self.port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            self.port = 0
        if not self.port or parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(
                f"vllm_server_base_url: {url!r} is not an address such as http://localhost:8000."
            )
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self.host = "127.0.0.1" if parts.hostname == "0.0.0.0" else parts.hostname
        self.seconds = seconds
        self._path = parts.path.rstrip("/")
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._open: set[HTTPConnection] = set()
        self._secret = shared_secret()
        self._challenge = ""  # the server's word, by which it knows requests that were recorded

    def ask(self, method: str, path: str, body: Any = None, seconds: float | None = None) -> Any:
        """One request; returns what the answer's JSON holds, or None if it is empty.

        The body is bytes, or what JSON can hold. With infinite `seconds` whoever asks looks after
        the server by other means. A `ServerError` says that there is no answer in time or its
        status is not 200, a `SecretError` that the server does not take, or prove, the secret.
        """
        if not isinstance(body, bytes):
            body = b"" if body is None else json.dumps(body).encode()
        status, text = self._exchange(method, path, body, seconds or self.seconds)
        if status != 200:
            words = text[:1000]
            with suppress(ValueError, LookupError, TypeError):
                words = str(json.loads(text)["error"]["message"])
            said = f"answered {method} {path} with status {status}: {words}"
            raise ServerError(f"The vLLM server {self.url} {said}", status)
        return json.loads(text) if text else None

    def request_with_retries(
        self, method: str, path: str, body: Any = None, seconds: float | None = None
    ) -> Any:
        """The same for a request that may be repeated, as it is while the server is busy."""
        end = time.monotonic() + self.seconds
        for pause in PAUSES:
            try:
                return self.ask(method, path, body, seconds)
            except ServerError as error:
                if error.status not in BUSY or time.monotonic() + pause >= end:
                    raise
            time.sleep(pause)
        return self.ask(method, path, body, seconds)

    def reset_prefix_cache(self) -> None:
        """Drop cached prompts, which were computed with other weights; see `ask`."""
        for _ in looks(self.seconds, LOOKS):
            if (self.ask("POST", "/reset_prefix_cache") or {}).get("success", True):
                return
        raise ServerError(
            f"The vLLM server {self.url} kept its prefix cache for {self.seconds:g} s: "
            "other clients' requests are running. A server serves one trainer."
        )

    def call_workers(self, method: str, *args: Any, seconds: float | None = None) -> list[Any]:
        """Call a method of all workers; see `ask`."""
        body = {"method": method, "args": args}
        return list(self.ask("POST", "/collective_rpc", body, seconds)["results"])

    def wait_until_healthy(self) -> None:
        """Wait for a server that may still be starting; see `ask`."""
        last = ""
        for left in looks(self.seconds, LOOKS):
            try:
                self.ask("GET", "/health", seconds=max(LOOKS, left))
                return
            except SecretError:
                raise
            except ServerError as error:
                last = str(error)
        raise ServerError(
            f"No vLLM server was ready at {self.url} within vllm_server_timeout={self.seconds:g} "
            f"s. {HOW} The last attempt: {last}"
        )

    def close(self) -> None:
        """End all requests that are under way; the server then drops them too."""
        for connection in list(self._open):
            if connection.sock is not None:
                with suppress(OSError):  # it may have ended by itself
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _exchange(self, method: str, path: str, content: bytes, seconds: float) -> tuple[int, str]:
        """Status and text of an answer, by a server that has proven to know the secret."""
        for is_last in (False, True):
            challenge = self._challenge
            claim = SignedRequest(self._secret, challenge, method, path, digest(content))
            status, headers, text = self._send(method, path, content, claim.header, seconds)
            given = headers.get(ANSWER, "")
            if hmac.compare_digest(given.encode(), claim.answer(status, text).encode()):
                return status, text.decode(errors="replace")
            self._challenge = headers.get(CHALLENGE, challenge)
            if status != REFUSED or self._challenge == challenge or is_last:
                break
        words = f"The vLLM server {self.url} answered {method} {path} with status {status}"
        if status in BUSY:  # of something between, such as a proxy
            raise ServerError(f"{words}.", status)
        if status == REFUSED and CHALLENGE in headers:
            raise SecretError(f"{words}: it has another secret. {SAME_SECRET}", status)
        raise SecretError(
            f"{words} and did not prove that it knows the secret. {HOW} {SAME_SECRET}", status
        )

    def _send(
        self, method: str, path: str, content: bytes, claim: str, seconds: float
    ) -> tuple[int, Any, bytes]:
        """One request as it is: status, headers and body of the answer."""
        timeout = None if math.isinf(seconds) else seconds
        connection = self._kind(self.host, self.port, timeout=timeout)
        headers = {"Content-Type": "application/json", "Connection": "close", REQUEST: claim}
        self._open.add(connection)
        try:
            connection.request(method, self._path + path, content, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        except TimeoutError:
            words = f"gave no answer within {seconds:.3g} s"
        except (OSError, HTTPException, ValueError) as error:
            words = f"cannot be reached or is gone ({type(error).__name__}: {error})"
        finally:
            self._open.discard(connection)
            connection.close()
        raise ServerError(f"The vLLM server {self.url} {words}, asked for {path}.")


def looks(seconds: float, pause: float, longest: float | None = None) -> Iterator[float]:
    """Yield the seconds left, once at least; pauses between double up to the `longest`, if any."""
    end, left = time.monotonic() + seconds, max(seconds, 0.0)
    while True:
        yield left
        left = end - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(pause, left))
        pause = min(2 * pause, longest or pause)


def run_in_background(work: Callable[[], Any]) -> Future[Any]:
    """Do something in a thread that the end of the process does not wait for."""
    return run_in_threads([work], 1)[0]


def run_in_threads(works: Sequence[Callable[[], Any]], most: int) -> list[Future[Any]]:
    """Do the same with many works, in order, in at most so many threads.

    Once one has failed, those that have not begun are left out, and their futures never end. Where
    a limit of the machine allows fewer threads, those that could be started do all.
    """
    futures: list[Future[Any]] = [Future() for _ in works]
    waiting = deque(zip(works, futures, strict=True))

    def run() -> None:
        with suppress(IndexError):  # of the empty queue
            while True:
                work, future = waiting.popleft()
                try:
                    result = work()
                except BaseException as error:
                    waiting.clear()
                    future.set_exception(error)
                else:
                    future.set_result(result)

    for started in range(min(most, len(works))):
        try:
            threading.Thread(target=run, daemon=True).start()
        except RuntimeError:  # no more threads can be started
            if not started:
                raise
            break
    return futures
