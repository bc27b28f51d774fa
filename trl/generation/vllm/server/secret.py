"""The secret that a trainer shares with its vLLM servers: whoever proves to know it gets in.

It never travels. Whoever asks proves it over the whole request, a word that the server chose and
one that is used once; whoever answers proves it over the answer.
"""

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import Self

VARIABLE = "TRL_VLLM_TOKEN"
REQUEST, ANSWER, CHALLENGE = "X-TRL-Request", "X-TRL-Answer", "X-TRL-Challenge"  # HTTP headers
WEIGHTS = "/trl_weights"  # a route that takes bytes, which none of vLLM's does


def shared_secret() -> bytes:
    """The secret of this process; empty where none is set, which proves little but breaks nothing.

    Without one, a request still needs a header that no page in a browser can send.
    """
    return os.environ.get(VARIABLE, "").encode()


def proof(secret: bytes, *words: bytes) -> str:
    """64 hexadecimal digits that only someone who knows the secret can make from the words."""
    found = hmac.new(secret, digestmod="sha256")
    for word in words:
        found.update(len(word).to_bytes(8, "big") + word)
    return found.hexdigest()


def digest(body: bytes) -> str:
    """The hexadecimal SHA-256 of a body."""
    return hashlib.sha256(body).hexdigest()


@dataclass(frozen=True)
class SignedRequest:
    """A request that proves the secret by its header, and that nobody can alter or repeat."""

    secret: bytes = field(repr=False)
    challenge: str  # the word of the server
    method: str
    target: str  # path and query
    digest: str  # of its body
    nonce: str = field(default_factory=partial(secrets.token_hex, 16))  # tells it from all others

    @classmethod
    def read(cls, header: str, secret: bytes, method: str, target: str) -> Self | None:
        """The claim that a request makes in its header; None if it is not proven."""
        challenge, nonce, found, *_ = (*header.split(":"), "", "")
        claim = cls(secret, challenge, method, target, found, nonce)
        return claim if hmac.compare_digest(header.encode(), claim.header.encode()) else None

    @property
    def header(self) -> str:
        """For `REQUEST`."""
        words = "request", self.challenge, self.nonce, self.method, self.target, self.digest
        proven = proof(self.secret, *(word.encode() for word in words))
        return ":".join((self.challenge, self.nonce, self.digest, proven))

    def answer(self, status: int, body: bytes) -> str:
        """For `ANSWER`: what proves an answer to this request."""
        return proof(self.secret, b"answer", self.nonce.encode(), b"%d" % status, body)
