"""What stands before the routes of a vLLM server: proven requests of trainers alone get through.

`trl vllm-serve` names `Guard` to vLLM (`--middleware`). Imported by vLLM alone.
"""

import inspect
import json
import secrets
import time
from typing import Any

from ....imports import require
from .secret import ANSWER, CHALLENGE, REQUEST, WEIGHTS, SignedRequest, digest, shared_secret

Middleware: Any = require("starlette.middleware.base", "trl vllm-serve").BaseHTTPMiddleware
Response: Any = require("starlette.responses", "trl vllm-serve").Response

ROUTES = {
    *(("GET", "/health"), ("GET", "/openapi.json"), ("POST", WEIGHTS)),
    *(("POST", "/v1/completions"), ("POST", "/reset_prefix_cache"), ("POST", "/collective_rpc")),
}
WORKER_METHODS = "trl_"  # how the names of those begin that may be called by /collective_rpc
DAMAGED = "the request was altered or damaged on its way: its bytes are not those that were sent"


class Challenges:
    """Words of a server that keep a recorded request from being sent again."""

    def __init__(self, seconds: float = 600.0):
        self._seconds = seconds
        self._since = time.monotonic()
        self._spent: dict[str, set[str]] = {secrets.token_hex(16): set()}  # nonces by word

    @property
    def current(self) -> str:
        """The word for a request; given out for `seconds`, it is taken for as long again."""
        if time.monotonic() > self._since + self._seconds:
            self._since = time.monotonic()
            self._spent[secrets.token_hex(16)] = set()
            self._spent = dict(list(self._spent.items())[-2:])
        return list(self._spent)[-1]

    def spend(self, claim: SignedRequest) -> bool:
        """Note a claim that is proven; false if it was made before, or with another word."""
        spent = self._spent.get(claim.challenge)
        if spent is None or claim.nonce in spent:
            return False
        spent.add(claim.nonce)
        return True


class Guard(Middleware):
    """Lets proven requests to routes of training through, each once.

    Answers 401 to all others, without saying what is there; to proven ones 400 if their body is
    not the one that was sent, and 404 for other routes. Proves each answer to a proven request, so
    a trainer knows who gives it.
    """

    def __init__(self, app: Any):
        super().__init__(app)
        self._secret = shared_secret()
        self._challenges = Challenges()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await super().__call__(scope, receive, send)

    async def dispatch(self, request: Any, call_next: Any) -> Any:
        """Answer one request; `call_next` lets the server do so."""
        current = self._challenges.current
        query = request.url.query
        target = _path(request) + f"?{query}" * bool(query)
        header = request.headers.get(REQUEST, "")
        claim = SignedRequest.read(header, self._secret, request.method, target)
        if claim is None or not self._challenges.spend(claim):
            return _error(401, "secret", {CHALLENGE: current})
        if claim.digest != digest(body := await request.body()):
            answer = _error(400, DAMAGED)
        elif not _is_open(request.method, _path(request), body):
            answer = _error(404, "not a route for training")
        elif _path(request) == WEIGHTS:
            answer = await _hand_on(request.app.state.engine_client, body)
        else:
            answer = await _ask(request, call_next)
        answer.headers[ANSWER] = claim.answer(answer.status_code, answer.body)
        return answer


async def _ask(request: Any, call_next: Any) -> Any:
    """The server's whole answer."""
    try:
        found = await call_next(request)
        body = b"".join([part async for part in found.body_iterator])
        return Response(body, found.status_code, found.headers)
    except Exception as error:
        # Whoever handles these stands before this class, and would answer without proof.
        handler = request.app.exception_handlers.get(Exception)
        if handler is None:
            raise
        found = handler(request, error)
        return await found if inspect.isawaitable(found) else found


async def _hand_on(engine: Any, weights: bytes) -> Any:
    try:
        await engine.collective_rpc("trl_receive", args=(weights,))
    except Exception as error:  # of a worker
        return _error(500, str(error))
    return Response()


def _error(status: int, words: str, headers: dict[str, str] | None = None) -> Any:
    return Response(json.dumps({"error": {"message": words}}), status, headers)


def _path(request: Any) -> str:
    return str(request.scope["path"]).removeprefix(request.scope.get("root_path", ""))


def _is_open(method: str, path: str, body: bytes) -> bool:
    """Whether a trainer needs the route; of the methods of workers only those made for it."""
    if (method, path) not in ROUTES:
        return False
    if path != "/collective_rpc":
        return True
    try:
        return str(json.loads(body)["method"]).startswith(WORKER_METHODS)
    except (ValueError, LookupError, TypeError):
        return False
