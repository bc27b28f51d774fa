"""What stands before vLLM's HTTP server: only a trainer that knows the secret gets through.

`trl vllm-serve` names the class to vLLM (`--middleware`). Imported by vLLM alone.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable
from typing import Any

from .secret import ANSWER, CHALLENGE, REQUEST, Challenges, Claim, shared_secret

ROUTES = {
    *(("GET", "/health"), ("GET", "/openapi.json")),
    *(("POST", "/v1/completions"), ("POST", "/reset_prefix_cache"), ("POST", "/collective_rpc")),
}
WORKER_METHODS = "trl_"  # how the names of those begin that may be called by /collective_rpc

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Guard:
    """ASGI middleware that lets proven requests to routes of training through, each once.

    Answers 401 to all others, without saying what is there, and 404 to proven ones for other
    routes. Proves each answer, so a trainer knows who gives it.

    Args:
        app: the server.
    """

    def __init__(self, app: Any):
        self._app = app
        self._secret = shared_secret()
        self._challenges = Challenges()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:  # a websocket
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        current = self._challenges.current
        claim = self._proven_claim(scope)
        if claim is None or not claim.is_of(body := await _read(receive)):
            await _answer(send, 401, [(CHALLENGE, current)], b'{"error": {"message": "secret"}}')
            return
        if _is_open(scope["method"], _path(scope), body):
            status, headers, content = await self._ask(scope, _again(body, receive))
        else:
            status, headers, content = 404, [], b'{"error": {"message": "no route of training"}}'
        proven = (ANSWER, claim.answer(self._secret, status, content))
        await _answer(send, status, [*headers, proven], content)

    def _proven_claim(self, scope: Message) -> Claim | None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        claim = Claim.read(headers.get(REQUEST.lower().encode(), b"").decode("latin-1"))
        query = scope.get("query_string", b"").decode("latin-1")
        target = _path(scope) + f"?{query}" * bool(query)
        if claim is None or not claim.is_proven(self._secret, scope["method"], target):
            return None
        return claim if self._challenges.spend(claim) else None

    async def _ask(
        self, scope: Message, receive: Receive
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Status, headers and body of the server's answer."""
        sent: list[Message] = []

        async def keep(message: Message) -> None:
            sent.append(message)

        try:
            await self._app(scope, receive, keep)
        except Exception as error:
            # Whoever handles these stands before this class, and would answer without proof.
            from starlette.requests import Request

            handler = scope["app"].exception_handlers.get(Exception)
            if handler is None or sent:
                raise
            found = handler(Request(scope), error)
            response = await found if inspect.isawaitable(found) else found
            await response(scope, receive, keep)
        start, *rest = sent
        kept = [(name.decode(), value.decode("latin-1")) for name, value in start["headers"]]
        headers = [pair for pair in kept if pair[0].lower() != "content-length"]
        return start["status"], headers, b"".join(part.get("body", b"") for part in rest)


def _path(scope: Message) -> str:
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


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


async def _read(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """Yields the body that was read, and then what follows: the end of the connection."""
    waiting = [body]

    async def found() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return found


async def _answer(send: Send, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
    every = [*headers, ("content-length", str(len(body)))]
    pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in every]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
