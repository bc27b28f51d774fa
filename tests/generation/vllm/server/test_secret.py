"""What proves a secret."""

import dataclasses

import pytest

from trl.generation.vllm.server.secret import (
    Claim,
    proof,
    shared_secret,
)

KEY = b"key"


def test_the_secret_is_that_of_the_environment(monkeypatch):
    monkeypatch.setenv("TRL_VLLM_TOKEN", "word")
    assert shared_secret() == b"word"
    monkeypatch.delenv("TRL_VLLM_TOKEN")
    assert shared_secret() == b""


def test_proofs_depend_on_secret_words_and_where_words_end():
    found = proof(KEY, b"ab", b"c")
    assert len(found) == 64 and found == proof(KEY, b"ab", b"c")
    for secret, words in ((b"", (b"ab", b"c")), (KEY, (b"a", b"bc")), (KEY, (b"abc",))):
        assert proof(secret, *words) != found


def test_a_claim_is_of_one_request():
    claim = Claim.of(KEY, "now", "POST", "/x?a=1", b"body")
    assert Claim.read(claim.header) == claim and Claim.read("") is Claim.read("a:b") is None
    assert claim.is_proven(KEY, "POST", "/x?a=1") and claim.is_of(b"body")
    assert not claim.is_of(b"bodz")
    for secret, method, target in (
        (b"", "POST", "/x?a=1"),
        (KEY, "GET", "/x?a=1"),
        (KEY, "POST", "/x"),
    ):
        assert not claim.is_proven(secret, method, target)


@pytest.mark.parametrize("field", ["challenge", "nonce", "body", "proof"])
@pytest.mark.parametrize("word", ["", "00" * 32, "no digits"])
def test_no_part_of_a_claim_can_be_changed(field, word):
    claim = Claim.of(KEY, "now", "POST", "/x", b"body")
    assert not dataclasses.replace(claim, **{field: word}).is_proven(KEY, "POST", "/x")


def test_an_answer_is_to_one_request():
    claims = [Claim.of(KEY, "now", "GET", "/x", b"") for _ in range(2)]
    answer = claims[0].answer(KEY, 200, b"text")
    assert claims[0].is_answered(answer, KEY, 200, b"text")
    for claim, secret, status, text in (
        (claims[1], KEY, 200, b"text"),
        (claims[0], b"", 200, b"text"),
        (claims[0], KEY, 201, b"text"),
        (claims[0], KEY, 200, b"texT"),
    ):
        assert not claim.is_answered(answer, secret, status, text)
    assert not claims[0].is_answered("\xe9", KEY, 200, b"text")
