"""The middleware over a small app; tests/vllm_cpu has vLLM's own behind it."""

import asyncio
import json

import pytest

from trl.generation.vllm.server.guard import ROUTES, Guard
from trl.generation.vllm.server.secret import ANSWER, CHALLENGE, REQUEST, Claim

KEY = b"key"
DESCRIBE = json.dumps({"method": "trl_describe"}).encode()


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


def run(app, method, path, claim=None, parts=(b"",), **scope):
    """Status, headers and body of an answer."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages[-1]["more_body"] = False
    messages.append({"type": "http.disconnect"})
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    headers = [] if claim is None else [(REQUEST.lower().encode(), claim.header.encode())]
    about = {"type": "http", "method": method, "path": path, "headers": headers} | scope
    asyncio.run(app(about, receive, send))
    start, *rest = sent
    found = {name.decode(): value.decode() for name, value in start.get("headers", [])}
    return start.get("status"), found, b"".join(part["body"] for part in rest)


def claim_of(guard, method, path, body=b"", secret=KEY):
    challenge = run(guard, "GET", "/")[1][CHALLENGE.lower()]
    return Claim.of(secret, challenge, method, path, body)


@pytest.mark.parametrize(("method", "path"), sorted(ROUTES))
def test_routes_of_training_are_open_to_who_knows_the_secret(guard, method, path):
    claim = claim_of(guard, method, path, DESCRIBE)
    found = run(guard, method, path, claim, (DESCRIBE[:5], DESCRIBE[5:]))
    body = DESCRIBE + b"http.disconnect"  # which the server must see, to end what it was asked
    assert found[0] == 200 and found[2] == body and found[1]["a"] == "b"
    assert claim.is_answered(found[1][ANSWER.lower()], KEY, 200, body)
    assert int(found[1]["content-length"]) == len(body)
    assert run(guard, method, path, claim, (DESCRIBE,))[0] == 401, "a second time"


@pytest.mark.parametrize(
    "claim",
    [
        None,
        lambda guard: claim_of(guard, "GET", "/health", secret=b""),
        lambda guard: claim_of(guard, "POST", "/health"),
        lambda guard: claim_of(guard, "GET", "/healthy"),
        lambda guard: claim_of(guard, "GET", "/health", b"other"),
        lambda guard: Claim.of(KEY, "old", "GET", "/health", b""),
    ],
)
def test_others_are_refused_before_the_server_sees_them(guard, claim):
    status, headers, body = run(guard, "GET", "/health", claim and claim(guard))
    assert status == 401 and b"disconnect" not in body and ANSWER.lower() not in headers


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
    assert status == 404 and claim.is_answered(headers[ANSWER.lower()], KEY, 404, text)


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
