"""Authentication between a trainer and its vLLM servers, by a secret that both know.

The secret is never sent. A client signs each request (HMAC), with a challenge that the server chose
and a nonce that is used once, so a recorded request is refused. The server signs each response.
"""

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import Self

SECRET_VARIABLE = "TRL_VLLM_TOKEN"  # environment variable
# HTTP headers
REQUEST_HEADER = "X-TRL-Request"
RESPONSE_HEADER = "X-TRL-Answer"
CHALLENGE_HEADER = "X-TRL-Challenge"
WEIGHTS_ROUTE = "/trl_weights"  # takes bytes, as none of vLLM's own routes does


def shared_secret() -> bytes:
    """Return the secret of this process; empty if none is set.

    An empty secret keeps out browsers at least: pages cannot send the header of a request.
    """
    return os.environ.get(SECRET_VARIABLE, "").encode()


def sign(secret: bytes, *fields: bytes) -> str:
    """Return the HMAC-SHA256 of the fields in 64 hexadecimal digits."""
    signature = hmac.new(secret, digestmod="sha256")
    for value in fields:
        signature.update(len(value).to_bytes(8, "big") + value)
    return signature.hexdigest()


def digest(body: bytes) -> str:
    """Return the hexadecimal SHA-256 of a body."""
    return hashlib.sha256(body).hexdigest()


@dataclass(frozen=True)
class SignedRequest:
    """A request whose header proves that its sender knows the secret."""

    secret: bytes = field(repr=False)
    challenge: str  # from the server
    method: str
    target: str  # path and query
    digest: str  # of the body
    nonce: str = field(default_factory=partial(secrets.token_hex, 16))  # unique

    @classmethod
    def verify(cls, header: str, secret: bytes, method: str, target: str) -> Self | None:
        """Read a request from its header; None if the signature is wrong."""
        values = header.split(":")
        if len(values) != 4:
            return None
        challenge, nonce, body_digest, _ = values
        request = cls(secret, challenge, method, target, body_digest, nonce)
        return request if hmac.compare_digest(header.encode(), request.header.encode()) else None

    @property
    def header(self) -> str:
        """The value of `REQUEST_HEADER`."""
        signature = sign(
            self.secret,
            b"request",
            self.challenge.encode(),
            self.nonce.encode(),
            self.method.encode(),
            self.target.encode(),
            self.digest.encode(),
        )
        return ":".join((self.challenge, self.nonce, self.digest, signature))

    def sign_response(self, status: int, body: bytes) -> str:
        """Return the value of `RESPONSE_HEADER` for a response to this request."""
        return sign(self.secret, b"answer", self.nonce.encode(), b"%d" % status, body)
