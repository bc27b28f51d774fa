"""The guard over a small app; tests/vllm_cpu has vLLM's own behind it."""

import asyncio
import json

import pytest

from trl.generation.vllm.server.secret import (
    CHALLENGE_HEADER,
    REQUEST_HEADER,
    RESPONSE_HEADER,
    WEIGHTS_ROUTE,
    SignedRequest,
    digest,
)
from trl.imports import is_available

if not is_available("starlette"):
    pytest.skip("starlette comes with vLLM", allow_module_level=True)

from trl.generation.vllm.server.guard import ROUTES, Challenges, Guard

KEY = b"key"
DESCRIBE = json.dumps({"method": "trl_describe"}).encode()


def test_each_claim_is_spent_once():
    challenges = Challenges()
    claim = SignedRequest(KEY, challenges.current, "GET", "/x", digest(b""))
    assert challenges.accept(claim) and not challenges.accept(claim)
    assert not challenges.accept(SignedRequest(KEY, "another word", "GET", "/x", digest(b"")))
    assert not Challenges().accept(claim), "of another server, or one that was started again"


def test_words_of_a_server_are_replaced():
    challenges = Challenges(seconds=-1.0)
    words = [challenges.current for _ in range(3)]
    assert len(set(words)) == 3 == len(challenges._used_nonces) + 1, (
        "what was spent is not kept forever"
    )
    made = [SignedRequest(KEY, word, "GET", "/x", digest(b"")) for word in words]
    assert [challenges.accept(claim) for claim in made] == [False, True, True]


@pytest.fixture
def guard(monkeypatch):
    monkeypatch.setenv("TRL_VLLM_TOKEN", KEY.decode())
    return Guard(echo)


async def echo(scope, receive, send):
    """Answers with what it was sent, in two parts."""
    if scope["type"] == "lifespan":
        await send({"type": "lifespan.startup.complete"})
        return
    body = (await receive())["body"]
    left = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": left["type"].encode()})


def run(guard, method, path, claim=None, parts=(b"",), **scope):
    """Status, headers and body of an answer."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages[-1]["more_body"] = False
    messages.append({"type": "http.disconnect"})
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    headers = [] if claim is None else [(REQUEST_HEADER.lower().encode(), claim.header.encode())]
    about = {"type": "http", "method": method, "path": path, "headers": headers} | scope
    asyncio.run(guard(about, receive, send))
    start, *rest = sent
    found = {name.decode(): value.decode() for name, value in start.get("headers", [])}
    return start.get("status"), found, b"".join(part["body"] for part in rest)


def claim_of(guard, method, path, body=b"", secret=KEY):
    challenge = run(guard, "GET", "/")[1][CHALLENGE_HEADER.lower()]
    return SignedRequest(secret, challenge, method, path, digest(body))


@pytest.mark.parametrize(("method", "path"), sorted(ROUTES - {("POST", WEIGHTS_ROUTE)}))
def test_routes_of_training_are_open_to_who_knows_the_secret(guard, method, path):
    claim = claim_of(guard, method, path, DESCRIBE)
    found = run(guard, method, path, claim, (DESCRIBE[:5], DESCRIBE[5:]))
    body = DESCRIBE + b"http.disconnect"  # which the server must see, to end what it was asked
    assert found[0] == 200 and found[2] == body and found[1]["a"] == "b"
    assert found[1][RESPONSE_HEADER.lower()] == claim.sign_response(200, body)
    assert int(found[1]["content-length"]) == len(body)
    assert run(guard, method, path, claim, (DESCRIBE,))[0] == 401, "a second time"


class Engine:
    """vLLM's own, of which it is told what workers are to do."""

    def __init__(self):
        self.state, self.engine_client, self.calls = self, self, []

    async def collective_rpc(self, method, args):
        self.calls.append((method, args))
        if b"bad" in args:
            raise ValueError("of a worker")


def test_weights_are_handed_to_workers(guard):
    engine = Engine()
    for body, expected in ((b"\x00\xff", (200, b"")), (b"bad", (500, b"of a worker"))):
        claim = claim_of(guard, "POST", WEIGHTS_ROUTE, body)
        status, headers, text = run(guard, "POST", WEIGHTS_ROUTE, claim, (body,), app=engine)
        assert status == expected[0] and expected[1] in text
        assert headers[RESPONSE_HEADER.lower()] == claim.sign_response(status, text)
        assert run(guard, "POST", WEIGHTS_ROUTE, claim, (body,), app=engine)[0] == 401
    assert engine.calls == [("trl_receive", (body,)) for body in (b"\x00\xff", b"bad")]


@pytest.mark.parametrize(
    "claim",
    [
        None,
        lambda guard: claim_of(guard, "GET", "/health", secret=b""),
        lambda guard: claim_of(guard, "POST", "/health"),
        lambda guard: claim_of(guard, "GET", "/healthy"),
        lambda guard: SignedRequest(KEY, "old", "GET", "/health", digest(b"")),
    ],
)
def test_others_are_refused_before_the_server_sees_them(guard, claim):
    status, headers, body = run(guard, "GET", "/health", claim and claim(guard))
    assert status == 401 and b"disconnect" not in body and RESPONSE_HEADER.lower() not in headers


def test_a_byte_that_changed_on_the_way_is_no_wrong_secret(guard):
    engine, claim = Engine(), claim_of(guard, "POST", WEIGHTS_ROUTE, b"weights")
    status, headers, text = run(guard, "POST", WEIGHTS_ROUTE, claim, (b"weighty",), app=engine)
    assert status == 400 and b"altered or damaged in transit" in text and not engine.calls
    assert headers[RESPONSE_HEADER.lower()] == claim.sign_response(400, text)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/completions", b""),
        ("POST", "/pause", b""),
        ("POST", "/collective_rpc", b'{"method": "load_model"}'),
        ("POST", "/collective_rpc", b'{"method": ["trl_describe"]}'),
        ("POST", "/collective_rpc", b"[]"),
        ("POST", "/collective_rpc", b"no json"),
    ],
)
def test_what_training_does_not_need_is_off(guard, method, path, body):
    claim = claim_of(guard, method, path, body)
    status, headers, text = run(guard, method, path, claim, (body,))
    assert status == 404 and headers[RESPONSE_HEADER.lower()] == claim.sign_response(404, text)


def test_paths_below_a_root_and_queries_are_part_of_a_claim(guard):
    claim = claim_of(guard, "GET", "/health?a=1")
    found = run(guard, "GET", "/vllm/health", claim, root_path="/vllm", query_string=b"a=1")
    assert found[0] == 200


def test_what_is_no_request(guard):
    assert run(guard, "", "", type="websocket") == (None, {}, b"")
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(guard({"type": "lifespan"}, None, send))
    asyncio.run(guard({"type": "websocket"}, None, send))
    assert sent == [
        {"type": "lifespan.startup.complete"},
        {"type": "websocket.close", "code": 1008},
    ]
