"""The secret that a trainer shares with its vLLM servers: who proves to know it gets through.

It never travels. Who asks proves it over the whole request, a word that the server chose and one
that is used once; who answers proves it over the answer. `trl vllm-serve` names `Guard` to vLLM
(`--middleware`). Imports the standard library alone: it runs in the workers too.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import json
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

VARIABLE = "TRL_VLLM_TOKEN"
REQUEST, ANSWER, CHALLENGE = "X-TRL-Request", "X-TRL-Answer", "X-TRL-Challenge"  # HTTP headers
ROUTES = {
    *(("GET", "/health"), ("GET", "/openapi.json")),
    *(("POST", "/v1/completions"), ("POST", "/reset_prefix_cache"), ("POST", "/collective_rpc")),
}
WORKER_METHODS = "trl_"  # how the names of those begin that may be called by /collective_rpc

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def shared_secret() -> bytes:
    """The secret of this process; empty where none is set, which proves little but breaks nothing.

    Without one, a request still needs a header that no page in a browser can send.
    """
    return os.environ.get(VARIABLE, "").encode()


def proof(secret: bytes, *words: bytes) -> str:
    """64 hexadecimal digits that only who knows the secret can make of the words."""
    found = hmac.new(secret, digestmod="sha256")
    for word in words:
        found.update(len(word).to_bytes(8, "big") + word)
    return found.hexdigest()


def is_proven(given: bytes, secret: bytes, *words: bytes) -> bool:
    """Whether `given` is the proof of the words; takes as long whatever it is."""
    return hmac.compare_digest(given, proof(secret, *words).encode())


@dataclass(frozen=True)
class Claim:
    """What the header of a request says; `Claim.of` makes one, `read` reads one."""

    challenge: str  # the word of the server
    nonce: str  # tells the request from all others
    body: str  # hexadecimal SHA-256 of its body
    proof: str  # of all this with method and target, hexadecimal

    @classmethod
    def of(cls, secret: bytes, challenge: str, method: str, target: str, body: bytes) -> Claim:
        """The claim of a new request to a path."""
        found = cls(challenge, secrets.token_hex(16), hashlib.sha256(body).hexdigest(), "")
        words = found._words(method, target)
        return replace(found, proof=proof(secret, *words))

    @classmethod
    def read(cls, header: str) -> Claim | None:
        """The claim in a header; None if there is none."""
        parts = header.split(":")
        return cls(*parts) if len(parts) == 4 else None

    @property
    def header(self) -> str:
        """For `REQUEST`."""
        return ":".join((self.challenge, self.nonce, self.body, self.proof))

    def is_proven(self, secret: bytes, method: str, target: str) -> bool:
        """Whether who made it knows the secret, and made it for this request."""
        return is_proven(self.proof.encode(), secret, *self._words(method, target))

    def is_of(self, body: bytes) -> bool:
        """Whether the body is the one that was claimed."""
        return hmac.compare_digest(hashlib.sha256(body).hexdigest(), self.body)

    def answer(self, secret: bytes, status: int, body: bytes) -> str:
        """For `ANSWER`: the proof of an answer to this request."""
        return proof(secret, b"answer", self.nonce.encode(), b"%d" % status, body)

    def is_answered(self, given: str, secret: bytes, status: int, body: bytes) -> bool:
        """Whether an answer is of someone who knows the secret, and to this request."""
        return hmac.compare_digest(given.encode(), self.answer(secret, status, body).encode())

    def _words(self, method: str, target: str) -> list[bytes]:
        words = "request", self.challenge, self.nonce, method, target, self.body
        return [word.encode() for word in words]


class Challenges:
    """Words of a server by which a request that was recorded cannot be sent again.

    Args:
        seconds (`float`): for which a word is good; it is taken for as long again.
    """

    def __init__(self, seconds: float = 600.0):
        self._seconds = seconds
        self._since = time.monotonic()
        self._spent: dict[str, set[str]] = {secrets.token_hex(16): set()}  # nonces by word

    @property
    def current(self) -> str:
        """The word that a request is to be made with."""
        if time.monotonic() > self._since + self._seconds:
            self._since = time.monotonic()
            self._spent[secrets.token_hex(16)] = set()
            self._spent = dict(list(self._spent.items())[-2:])
        return list(self._spent)[-1]

    def spend(self, claim: Claim) -> bool:
        """Note a claim that is proven; false if it was made before, or with another word."""
        spent = self._spent.get(claim.challenge)
        if spent is None or claim.nonce in spent:
            return False
        spent.add(claim.nonce)
        return True


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
