"""The secret that a trainer shares with its vLLM servers: who proves to know it gets through.

It never travels. Who asks proves it over the whole request, a word that the server chose and one
that is used once; who answers proves it over the answer.
"""

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, replace
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
    """64 hexadecimal digits that only who knows the secret can make of the words."""
    found = hmac.new(secret, digestmod="sha256")
    for word in words:
        found.update(len(word).to_bytes(8, "big") + word)
    return found.hexdigest()


@dataclass(frozen=True)
class Claim:
    """What the header of a request says; `Claim.of` makes one, `read` reads one."""

    challenge: str  # the word of the server
    nonce: str  # tells the request from all others
    body: str  # hexadecimal SHA-256 of its body
    proof: str  # of all this with method and target, hexadecimal

    @classmethod
    def of(cls, secret: bytes, challenge: str, method: str, target: str, body: bytes) -> Self:
        """The claim of a new request to a path."""
        found = cls(challenge, secrets.token_hex(16), hashlib.sha256(body).hexdigest(), "")
        return replace(found, proof=found._proof(secret, method, target))

    @classmethod
    def read(cls, header: str) -> Self | None:
        """The claim in a header; None if there is none."""
        parts = header.split(":")
        return cls(*parts) if len(parts) == 4 else None

    @property
    def header(self) -> str:
        """For `REQUEST`."""
        return ":".join((self.challenge, self.nonce, self.body, self.proof))

    def is_proven(self, secret: bytes, method: str, target: str) -> bool:
        """Whether who made it knows the secret, and made it for this request."""
        expected = self._proof(secret, method, target)
        return hmac.compare_digest(self.proof.encode(), expected.encode())

    def is_of(self, body: bytes) -> bool:
        """Whether the body is the one that was claimed."""
        return hmac.compare_digest(hashlib.sha256(body).hexdigest(), self.body)

    def answer(self, secret: bytes, status: int, body: bytes) -> str:
        """For `ANSWER`: the proof of an answer to this request."""
        return proof(secret, b"answer", self.nonce.encode(), b"%d" % status, body)

    def is_answered(self, given: str, secret: bytes, status: int, body: bytes) -> bool:
        """Whether an answer is of someone who knows the secret, and to this request."""
        return hmac.compare_digest(given.encode(), self.answer(secret, status, body).encode())

    def _proof(self, secret: bytes, method: str, target: str) -> str:
        words = "request", self.challenge, self.nonce, method, target, self.body
        return proof(secret, *(word.encode() for word in words))
