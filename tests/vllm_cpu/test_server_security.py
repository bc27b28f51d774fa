"""A real server, and who may ask it for something."""

import json
import socket
from http.client import HTTPConnection
from pathlib import Path

import psutil
import pytest
from shared_vllm import needs_vllm, nudge, policy_model
from vllm_rows import PROMPTS, gap, sampling
from vllm_server import CPU, RunningServer, server_backend

from trl.generation.vllm.server.backend import ServerPool
from trl.generation.vllm.server.client import SecretError, ServerError, VLLMClient
from trl.generation.vllm.server.guard import ROUTES
from trl.generation.vllm.server.secret import (
    CHALLENGE_HEADER,
    REQUEST_HEADER,
    RESPONSE_HEADER,
    WEIGHTS_ROUTE,
    SignedRequest,
    digest,
)

pytestmark = [needs_vllm, pytest.mark.vllm]
SECRET = "of trainer and server"
DESCRIBE = json.dumps({"method": "trl_describe"}).encode()
BESIDE = {("GET", path) for path in ("/docs", "/metrics", "/nothing")}
BESIDE |= {("OPTIONS", "/health"), ("POST", WEIGHTS_ROUTE)}


@pytest.fixture(scope="module")
def running():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_VLLM_TOKEN", SECRET)
        server = RunningServer(secret=SECRET)
        server.connect()
        yield server
        server.kill()


def ask(server, method, path, body=b"", claim=None):
    """Status, headers and body of an answer, with no header or with that of a claim."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
    headers = {} if claim is None else {REQUEST_HEADER: claim}
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read()


def claim_of(server, method, path, body=b"", secret=SECRET):
    """A claim as a trainer makes it, with the word that the server gives to everyone."""
    _, headers, _ = ask(server, "GET", "/health")
    return SignedRequest(
        secret.encode(), headers[CHALLENGE_HEADER], method, path, digest(body)
    ).header


def all_routes(server):
    paths = VLLMClient(server.url, 20.0).request("GET", "/openapi.json")["paths"]
    return {(kind.upper(), path) for path, kinds in paths.items() for kind in kinds} | BESIDE


def test_no_route_answers_without_the_secret_or_with_another(running):
    routes = all_routes(running)
    assert len(routes) > 20 and routes > ROUTES - {("GET", "/openapi.json")}
    for method, path in sorted(routes):
        for claim in (None, claim_of(running, method, path, secret="another")):
            status, headers, body = ask(running, method, path, claim=claim)
            assert (status, headers[RESPONSE_HEADER]) == (401, None), (method, path)
            assert body in (b"", b'{"error": {"message": "secret"}}')


def test_routes_that_training_does_not_need_are_off(running):
    for method, path in sorted(all_routes(running) - ROUTES):
        claim = claim_of(running, method, path)
        assert ask(running, method, path, claim=claim)[0] == 404, (method, path)


@pytest.mark.parametrize("method", ["reload_weights", "init_device", "__init__", 3, None])
def test_workers_run_only_what_was_made_for_trainers(running, method):
    with pytest.raises(ServerError, match="status 404: not a route for training"):
        VLLMClient(running.url, 20.0).call_workers(method)


def test_websockets_are_refused(running):
    head = f"GET /v1/realtime HTTP/1.1\r\nHost: x:{running.port}\r\nUpgrade: websocket\r\n"
    head += "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    head += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    with socket.create_connection(("127.0.0.1", running.port), 20) as connection:
        connection.sendall(head.encode())
        assert connection.recv(1000).split()[1] in (b"401", b"403")


def test_a_request_that_was_recorded_is_refused(running):
    claim = claim_of(running, "POST", "/collective_rpc", DESCRIBE)
    again = [ask(running, "POST", "/collective_rpc", DESCRIBE, claim) for _ in range(3)]
    assert [status for status, _, _ in again] == [200, 401, 401]
    assert b"protocol" in again[0][2] and b"protocol" not in again[1][2]


def test_a_claim_opens_nothing_but_what_it_was_made_for(running):
    claim = claim_of(running, "POST", "/collective_rpc", DESCRIBE)
    other = json.dumps({"method": "trl_held"}).encode()
    assert ask(running, "POST", "/reset_prefix_cache", DESCRIBE, claim)[0] == 401
    assert ask(running, "POST", "/collective_rpc?a=1", DESCRIBE, claim)[0] == 401
    assert ask(running, "POST", "/collective_rpc", other, claim)[0] == 400
    assert ask(running, "POST", "/collective_rpc", DESCRIBE, claim)[0] == 401, "it is spent"


def test_a_trainer_with_another_secret_is_told_so(running, monkeypatch):
    for wrong in ("", "another"):
        monkeypatch.setenv("TRL_VLLM_TOKEN", wrong)
        with pytest.raises(SecretError, match="it has another secret. Give TRL_VLLM_TOKEN"):
            VLLMClient(running.url, 120.0).wait_until_healthy()


def test_errors_of_the_server_are_proven_too(running):
    with pytest.raises(ServerError, match="status 500.*trl_missing") as caught:
        VLLMClient(running.url, 20.0).call_workers("trl_missing")
    assert not isinstance(caught.value, SecretError)


def test_the_secret_is_on_no_command_line(running):
    words = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline")]
    assert any(b"vllm.entrypoints" in line or b"api_server" in line for line in words)
    assert not any(SECRET.encode() in line for line in words)


def test_weights_that_were_recorded_are_refused(running, monkeypatch):
    """Whatever a stranger sends again, changed or not, a run goes on as if nobody had."""
    model, recorded, send = policy_model(), [], VLLMClient._send

    def record(self, method, path, content, claim, seconds):
        recorded.append((method, path, content, claim))
        return send(self, method, path, content, claim, seconds)

    monkeypatch.setattr(VLLMClient, "_send", record)
    pool = ServerPool([running.connect()])
    pool.join(CPU)
    backend = server_backend(model, pool=pool)
    for step in range(2):
        backend.sync_weights(step)
        assert gap(model, backend.generate(PROMPTS, sampling(), 4)) <= 1e-4
        nudge(model)
        for method, path, content, claim in recorded:
            for body in (content, content[:-1] + b"x"):
                assert ask(running, method, path, body, claim)[0] == 401
    assert WEIGHTS_ROUTE in [path for _, path, _, _ in recorded]


def test_a_run_opens_no_port(running):
    """So nobody can come between a trainer and its servers where it waits for them."""
    pool = ServerPool([running.connect()])
    before = psutil.Process().net_connections()
    pool.join(CPU)
    backend = server_backend(policy_model(), pool=pool)
    backend.generate(PROMPTS, sampling(), 4)
    opened = [c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    assert opened == [c.laddr for c in before if c.status == "LISTEN"]
