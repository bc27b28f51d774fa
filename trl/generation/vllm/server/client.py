"""HTTP client of a vLLM server, and calls that run in background threads."""

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
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import torch
from transformers import PretrainedConfig

from ....imports import major_minor
from .secret import (
    CHALLENGE_HEADER,
    REQUEST_HEADER,
    RESPONSE_HEADER,
    SECRET_VARIABLE,
    SignedRequest,
    digest,
    shared_secret,
)

# Version of the messages between trainer and workers; raised by changes that break older sides.
PROTOCOL = 4
# Fields of a model's configuration in which trainer and server must agree.
SHAPE_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)


@dataclass(frozen=True)
class ServerFacts:
    """What one of a server's workers reports about it."""

    protocol: int  # `PROTOCOL` of its side
    vllm: str  # version
    shape: dict[str, Any]  # `SHAPE_FIELDS` of its model
    dtype: str  # in which it computes
    context: int  # maximum tokens of prompt plus completion
    logprobs_mode: str  # vLLM's option
    workers: int  # number of processes that receive weights
    gpu: str | None  # of this worker; None: it is on a CPU


def model_shape(config: PretrainedConfig) -> dict[str, Any]:
    """Return the sizes in which two models must agree to exchange weights."""
    text_config = config.get_text_config()
    return {name: getattr(text_config, name, None) for name in SHAPE_FIELDS}


def gpu_id(device: torch.device) -> str | None:
    """Return the UUID of a GPU; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def incompatibilities(server: ServerFacts, required: ServerFacts) -> list[str]:
    """Return sentences that say why a server cannot be used for a policy; empty if it can."""
    problems = []
    if server.protocol != required.protocol:
        problems.append("It runs another version of trl: install the same one on both sides.")
    if major_minor(server.vllm) != major_minor(required.vllm):
        problems.append(
            f"It runs vLLM {server.vllm} and the trainer {required.vllm}: install the same release "
            "on both sides."
        )
    for name, value in required.shape.items():
        if server.shape.get(name) != value:
            problems.append(
                f"Its model has {name}={server.shape.get(name)} and the policy {value}: start it "
                "with the model that is trained (--model)."
            )
            break
    if server.dtype != required.dtype:
        problems.append(
            f"It computes in {server.dtype} and the policy in {required.dtype}: start it with "
            f"--dtype {required.dtype}."
        )
    if server.logprobs_mode != required.logprobs_mode:
        problems.append(
            f"Its log-probabilities are {server.logprobs_mode}: start it with --logprobs-mode "
            f"{required.logprobs_mode}."
        )
    if server.context < required.context:
        problems.append(
            f"It has a context of {server.context} tokens, but "
            f"max_completion_length={required.context - 1} leaves no room for a prompt: start it "
            "with a larger --max_model_len."
        )
    if server.gpu is not None and server.gpu == required.gpu:
        problems.append(
            "It runs on the GPU that trains: give it other devices (CUDA_VISIBLE_DEVICES), or use "
            "vllm_mode='colocate'."
        )
    return problems


RETRY_STATUSES = (500, 502, 503)  # after which a request that may be repeated is
UNAUTHORIZED = 401
RETRY_PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds before each retry
POLL_SECONDS = 0.25  # between two checks of a server that is starting
START_HINT = "Start it with `trl vllm-serve`."
SECRET_HINT = f"Give {SECRET_VARIABLE} the same value where it is started and where training is."


class ServerError(ConnectionError):
    """A vLLM server cannot be reached, does not answer, or answered with an error status."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status  # None: there was no response


class SecretError(ServerError):
    """Server and trainer have different secrets, or the other side is no server for training."""


@dataclass(frozen=True)
class _Response:
    status: int
    headers: HTTPMessage
    body: bytes


class VLLMClient:
    """A vLLM server at an address such as http://localhost:8000, that must answer in `seconds`."""

    def __init__(self, url: str, seconds: float):
        address = urlsplit(url if "//" in url else f"http://{url}")
        is_https = address.scheme == "https"
        try:
            self.port = address.port or (443 if is_https else 80)
        except ValueError:
            self.port = 0
        if not self.port or address.scheme not in ("http", "https") or address.hostname is None:
            raise ValueError(
                f"vllm_server_base_url: {url!r} is not an address such as http://localhost:8000."
            )
        self._path = address.path.rstrip("/")
        self.url = f"{address.scheme}://{address.netloc}{self._path}"
        self.host = "127.0.0.1" if address.hostname == "0.0.0.0" else address.hostname
        self.seconds = seconds
        self._connection_class = HTTPSConnection if is_https else HTTPConnection
        self._connections: set[HTTPConnection] = set()  # of requests that are running
        self._secret = shared_secret()
        self._challenge = ""  # the server's last one

    def request(
        self, method: str, path: str, body: object = None, seconds: float | None = None
    ) -> Any:
        """Make a request and return the JSON of the response, or None if it is empty.

        `body` is bytes, or anything that JSON can hold. With infinite `seconds`, the caller must
        check in another way that the server is alive. Raises `ServerError` if there is no response
        in time or its status is not 200, and `SecretError` if the server rejects the secret or does
        not prove that it knows it.
        """
        if body is None:
            content = b""
        else:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, text = self._authenticated_request(method, path, content, seconds or self.seconds)
        if status != 200:
            message = text[:1000]
            with suppress(ValueError, LookupError, TypeError):
                message = str(json.loads(text)["error"]["message"])
            raise ServerError(
                f"The vLLM server {self.url} answered {method} {path} with status {status}: "
                f"{message}",
                status,
            )
        return json.loads(text) if text else None

    def request_with_retries(
        self, method: str, path: str, body: object = None, seconds: float | None = None
    ) -> Any:
        """Make a request that may be repeated, and repeat it while the server is busy."""
        end = time.monotonic() + self.seconds
        for pause in RETRY_PAUSES:
            try:
                return self.request(method, path, body, seconds)
            except ServerError as error:
                if error.status not in RETRY_STATUSES or time.monotonic() + pause >= end:
                    raise
            time.sleep(pause)
        return self.request(method, path, body, seconds)

    def reset_prefix_cache(self) -> None:
        """Drop cached prompts, which were computed with earlier weights."""
        for _ in poll(self.seconds, POLL_SECONDS):
            if (self.request("POST", "/reset_prefix_cache") or {}).get("success", True):
                return
        raise ServerError(
            f"The vLLM server {self.url} could not reset its prefix cache within "
            f"{self.seconds:g} s: other clients' requests are running. A server serves one trainer."
        )

    def call_workers(self, method: str, *args: object, seconds: float | None = None) -> list[Any]:
        """Call a method of all workers; return their results."""
        body = {"method": method, "args": args}
        return list(self.request("POST", "/collective_rpc", body, seconds)["results"])

    def wait_until_healthy(self) -> None:
        """Wait for a server that may still be starting."""
        last_error = ""
        for seconds_left in poll(self.seconds, POLL_SECONDS):
            try:
                self.request("GET", "/health", seconds=max(POLL_SECONDS, seconds_left))
                return
            except SecretError:
                raise
            except ServerError as error:
                last_error = str(error)
        raise ServerError(
            f"No vLLM server was ready at {self.url} within vllm_server_timeout={self.seconds:g} "
            f"s. {START_HINT} The last attempt: {last_error}"
        )

    def close(self) -> None:
        """Abort all running requests; the server aborts them, too."""
        for connection in list(self._connections):
            if connection.sock is not None:
                with suppress(OSError):  # it may just have ended
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _authenticated_request(
        self, method: str, path: str, content: bytes, seconds: float
    ) -> tuple[int, str]:
        """Sign and send a request; return status and text of a response with a valid signature.

        If the server has a new challenge, the request is signed and sent once more.
        """
        for is_last_attempt in (False, True):
            challenge = self._challenge
            signed = SignedRequest(self._secret, challenge, method, path, digest(content))
            response = self._send(method, path, content, signed.header, seconds)
            signature = response.headers.get(RESPONSE_HEADER, "")
            expected = signed.sign_response(response.status, response.body)
            if hmac.compare_digest(signature.encode(), expected.encode()):
                return response.status, response.body.decode(errors="replace")
            self._challenge = response.headers.get(CHALLENGE_HEADER, challenge)
            has_new_challenge = self._challenge != challenge
            if response.status != UNAUTHORIZED or not has_new_challenge or is_last_attempt:
                break
        status = response.status
        message = f"The vLLM server {self.url} answered {method} {path} with status {status}"
        if status in RETRY_STATUSES:  # from a proxy, perhaps
            raise ServerError(f"{message}.", status)
        if status == UNAUTHORIZED and CHALLENGE_HEADER in response.headers:
            raise SecretError(f"{message}: it has another secret. {SECRET_HINT}", status)
        raise SecretError(
            f"{message} and did not prove that it knows the secret. {START_HINT} {SECRET_HINT}",
            status,
        )

    def _send(
        self, method: str, path: str, content: bytes, signature: str, seconds: float
    ) -> _Response:
        """Send a request; return its response, of whatever status."""
        timeout = None if math.isinf(seconds) else seconds
        connection = self._connection_class(self.host, self.port, timeout=timeout)
        headers = {
            "Content-Type": "application/json",
            "Connection": "close",
            REQUEST_HEADER: signature,
        }
        self._connections.add(connection)
        try:
            connection.request(method, self._path + path, content, headers)
            response = connection.getresponse()
            return _Response(response.status, response.headers, response.read())
        except TimeoutError:
            problem = f"gave no answer within {seconds:.3g} s"
        except (OSError, HTTPException, ValueError) as error:
            problem = f"cannot be reached or is gone ({type(error).__name__}: {error})"
        finally:
            self._connections.discard(connection)
            connection.close()
        raise ServerError(f"The vLLM server {self.url} {problem}, asked for {path}.")


def poll(seconds: float, pause: float, max_pause: float | None = None) -> Iterator[float]:
    """Yield the seconds that are left, at least once, with pauses in between.

    Pauses double up to `max_pause`, if it is given.
    """
    end = time.monotonic() + seconds
    seconds_left = max(seconds, 0.0)
    while True:
        yield seconds_left
        seconds_left = end - time.monotonic()
        if seconds_left <= 0:
            return
        time.sleep(min(pause, seconds_left))
        pause = min(2 * pause, max_pause or pause)


def run_in_background(function: Callable[[], Any]) -> Future[Any]:
    """Call a function in a daemon thread."""
    return run_in_threads([function], 1)[0]


def run_in_threads(functions: Sequence[Callable[[], Any]], max_threads: int) -> list[Future[Any]]:
    """Call functions in order, in at most `max_threads` daemon threads.

    Once one has failed, no further function is called, and the futures of those never finish. If
    the machine limits the number of threads, those that could be started call all functions.
    """
    futures: list[Future[Any]] = [Future() for _ in functions]
    waiting = deque(zip(functions, futures, strict=True))

    def work() -> None:
        with suppress(IndexError):  # the queue is empty
            while True:
                function, future = waiting.popleft()
                try:
                    result = function()
                except BaseException as error:
                    waiting.clear()
                    future.set_exception(error)
                else:
                    future.set_result(result)

    for num_started in range(min(max_threads, len(functions))):
        try:
            threading.Thread(target=work, daemon=True).start()
        except RuntimeError:  # no more threads can be started
            if num_started == 0:
                raise
            break
    return futures
