"""What proves a secret."""

import dataclasses

import pytest

from trl.generation.vllm.server.secret import (
    SignedRequest,
    digest,
    shared_secret,
    sign,
)

KEY = b"key"


def test_the_secret_is_that_of_the_environment(monkeypatch):
    monkeypatch.setenv("TRL_VLLM_TOKEN", "word")
    assert shared_secret() == b"word"
    monkeypatch.delenv("TRL_VLLM_TOKEN")
    assert shared_secret() == b""


def test_proofs_depend_on_secret_words_and_where_words_end():
    found = sign(KEY, b"ab", b"c")
    assert len(found) == 64 and found == sign(KEY, b"ab", b"c")
    for secret, words in ((b"", (b"ab", b"c")), (KEY, (b"a", b"bc")), (KEY, (b"abc",))):
        assert sign(secret, *words) != found


def test_a_claim_is_of_one_request():
    claim = SignedRequest(KEY, "now", "POST", "/x?a=1", digest(b"body"))
    assert SignedRequest.verify(claim.header, KEY, "POST", "/x?a=1") == claim
    assert digest(b"body") != digest(b"bodz")
    for secret, method, target in (
        (b"", "POST", "/x?a=1"),
        (KEY, "GET", "/x?a=1"),
        (KEY, "POST", "/x"),
    ):
        assert SignedRequest.verify(claim.header, secret, method, target) is None
    for header in ("", "a:b", ":::", f"{claim.header}:", "\xe9"):
        assert SignedRequest.verify(header, KEY, "POST", "/x?a=1") is None


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("word", ["", "00" * 32, "no digits"])
def test_no_part_of_a_claim_can_be_changed(place, word):
    parts = SignedRequest(KEY, "now", "POST", "/x", digest(b"body")).header.split(":")
    parts[place] = word
    assert SignedRequest.verify(":".join(parts), KEY, "POST", "/x") is None


def test_an_answer_is_to_one_request():
    claims = [SignedRequest(KEY, "now", "GET", "/x", digest(b"")) for _ in range(2)]
    answer = claims[0].sign_response(200, b"text")
    assert answer == claims[0].sign_response(200, b"text")
    stranger = dataclasses.replace(claims[0], secret=b"")
    for claim, status, text in (
        (claims[1], 200, b"text"),
        (stranger, 200, b"text"),
        (claims[0], 201, b"text"),
        (claims[0], 200, b"texT"),
    ):
        assert claim.sign_response(status, text) != answer
