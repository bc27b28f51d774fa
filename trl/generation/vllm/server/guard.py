"""Middleware of a vLLM server that lets only a trainer's signed requests through.

`trl vllm-serve` passes `Guard` to vLLM (`--middleware`). Only vLLM imports this module.
"""

import inspect
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ....imports import require
from .secret import (
    CHALLENGE_HEADER,
    REQUEST_HEADER,
    RESPONSE_HEADER,
    WEIGHTS_ROUTE,
    SignedRequest,
    digest,
    shared_secret,
)

Middleware: Any = require("starlette.middleware.base", "trl vllm-serve").BaseHTTPMiddleware
Response: Any = require("starlette.responses", "trl vllm-serve").Response

# The routes that training needs: method and path.
ROUTES = {
    ("GET", "/health"),
    ("GET", "/openapi.json"),
    ("POST", "/collective_rpc"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/v1/completions"),
    ("POST", WEIGHTS_ROUTE),
}
WORKER_METHOD_PREFIX = "trl_"  # of the methods that /collective_rpc may call
DAMAGED = "the request was altered or damaged in transit: its body is not the one that was signed"

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Challenges:
    """The server's challenges, which keep recorded requests from being sent again."""

    def __init__(self, seconds: float = 600.0):
        self._seconds = seconds
        self._since = time.monotonic()
        self._used_nonces: dict[str, set[str]] = {secrets.token_hex(16): set()}  # by challenge

    @property
    def current(self) -> str:
        """The challenge for new requests. It changes after `seconds`; the previous one is valid."""
        if time.monotonic() > self._since + self._seconds:
            self._since = time.monotonic()
            self._used_nonces[secrets.token_hex(16)] = set()
            self._used_nonces = dict(list(self._used_nonces.items())[-2:])
        return list(self._used_nonces)[-1]

    def accept(self, request: SignedRequest) -> bool:
        """Whether a request has a valid challenge and a new nonce, which is then used."""
        nonces = self._used_nonces.get(request.challenge)
        if nonces is None or request.nonce in nonces:
            return False
        nonces.add(request.nonce)
        return True


class Guard(Middleware):
    """Lets each signed request to a route of training through, once.

    Other requests get status 401, whatever the route. Signed requests get 400 if their body is not
    the one that was signed, and 404 for other routes. Responses to signed requests are signed, so
    the trainer knows that they come from this server.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]):
        super().__init__(app)
        self._secret = shared_secret()
        self._challenges = Challenges()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection (ASGI). Websockets are closed."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await super().__call__(scope, receive, send)

    async def dispatch(self, request: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
        """Respond to a starlette `Request`; `call_next` passes it to the server."""
        challenge = self._challenges.current
        path = _path(request)
        target = f"{path}?{request.url.query}" if request.url.query else path
        header = request.headers.get(REQUEST_HEADER, "")
        signed = SignedRequest.verify(header, self._secret, request.method, target)
        if signed is None or not self._challenges.accept(signed):
            return _error(401, "secret", {CHALLENGE_HEADER: challenge})
        body = await request.body()
        if signed.digest != digest(body):
            response = _error(400, DAMAGED)
        elif not _is_open(request.method, path, body):
            response = _error(404, "not a route for training")
        elif path == WEIGHTS_ROUTE:
            response = await _send_to_workers(request.app.state.engine_client, body)
        else:
            response = await _respond(request, call_next)
        signature = signed.sign_response(response.status_code, response.body)
        response.headers[RESPONSE_HEADER] = signature
        return response


async def _respond(request: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
    """Return the server's response with its whole body."""
    try:
        response = await call_next(request)
        body = b"".join([chunk async for chunk in response.body_iterator])
        return Response(body, response.status_code, response.headers)
    except Exception as error:
        # The server's handler runs outside this middleware, so its response would not be signed.
        handler = request.app.exception_handlers.get(Exception)
        if handler is None:
            raise
        response = handler(request, error)
        return await response if inspect.isawaitable(response) else response


async def _send_to_workers(engine_client: Any, weights: bytes) -> Any:
    try:
        await engine_client.collective_rpc("trl_receive", args=(weights,))
    except Exception as error:  # of a worker
        return _error(500, str(error))
    return Response()


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Any:
    return Response(json.dumps({"error": {"message": message}}), status, headers)


def _path(request: Any) -> str:
    return str(request.scope["path"]).removeprefix(request.scope.get("root_path", ""))


def _is_open(method: str, path: str, body: bytes) -> bool:
    """Whether training needs the route; of workers, only the methods of `WeightWorker` are open."""
    if (method, path) not in ROUTES:
        return False
    if path != "/collective_rpc":
        return True
    try:
        return str(json.loads(body)["method"]).startswith(WORKER_METHOD_PREFIX)
    except (ValueError, LookupError, TypeError):
        return False
