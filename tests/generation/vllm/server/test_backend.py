"""Servers as they answer when something is wrong; tests/vllm_cpu has real ones, and two ranks."""

import dataclasses
import threading
import time

import pytest
import torch
from shared_vllm import model_policy
from stub_server import HEALTHY, completed, routes, stub_server, workers
from torch import nn

from trl.generation.base import Sampling
from trl.generation.vllm.sampling import CompletionRequest
from trl.generation.vllm.server import backend as server_backend
from trl.generation.vllm.server import client as vllm_client
from trl.generation.vllm.server.backend import Server, ServerPool, VLLMServerBackend
from trl.generation.vllm.server.client import ServerError
from trl.generation.vllm.server.secret import WEIGHTS_ROUTE
from trl.types import Prompts

CPU = torch.device("cpu")
POLICY = model_policy(nn.Linear(1, 1))
PROMPTS = Prompts(messages=["x"], token_ids=[[9]])
ONE = Sampling(max_tokens=1, seeds=(3,))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(vllm_client, "RETRY_PAUSES", (0.01,) * 4)
    monkeypatch.setattr(server_backend, "ERROR_WAIT_SECONDS", 0.1)


def test_what_a_server_says_of_itself():
    with stub_server(routes()) as stub:
        found = Server(stub.url, 5.0)
    assert found.facts.context == 64


def test_options_that_a_server_would_not_read():
    schema = {"schemas": {"CompletionRequest": {"properties": {"stop": {}, "logit_bias": {}}}}}
    with stub_server(routes() | {"/openapi.json": [(200, {"components": schema})]}) as stub:
        server = Server(stub.url, 5.0)
        server.check(server.facts, Sampling(max_tokens=1))
        assert "/openapi.json" not in [path for path, _ in stub.seen], "it takes long"
        server.check(
            server.facts, Sampling(max_tokens=1, extra={"stop": ["a"], "do_sample": False})
        )
        with pytest.raises(ValueError, match="'logit_bia'. .* Did you mean logit_bias?"):
            server.check(server.facts, Sampling(max_tokens=1, extra={"logit_bia": {}}))


def test_a_server_that_does_not_fit_is_named():
    with stub_server(routes()) as stub:
        server = Server(stub.url, 5.0)
        wanted = dataclasses.replace(server.facts, dtype="bfloat16")
        with pytest.raises(ValueError, match=f"{stub.url} cannot be used. It computes in float32"):
            server.check(wanted, Sampling(max_tokens=1))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((500, {"error": {"message": "no attribute"}}), "cannot receive a trainer.*no attribute"),
        ((200, {"results": [{"protocol": 0, "new": 1}]}), "another version of trl"),
        ((403, "who are you?"), "status 403: who are you"),
    ],
    ids=["no worker", "version", "other"],
)
def test_servers_that_were_not_started_for_training(answer, words):
    refuses = pytest.raises(ServerError, match=words)
    with stub_server(HEALTHY | {"/collective_rpc": [answer]}) as stub, refuses:
        Server(stub.url, 5.0)


def test_a_worker_that_does_not_join():
    with stub_server(routes(trl_join=lambda *args: time.sleep(1.0))) as stub:
        found = ServerPool([Server(stub.url, 0.3)])
        with pytest.raises(ServerError, match="gave no answer within 0.3 s"):
            found.join(CPU)


def test_servers_that_work_are_not_waited_for_where_one_fails():
    """Neither to join nor to take weights."""
    failed, hangs = (500, {"error": {"message": "of a worker"}}), threading.Event()
    slow = [(200, lambda body: hangs.wait(60))]
    with stub_server(routes()) as one, stub_server(routes()) as two:
        found = ServerPool([Server(stub.url, 300.0) for stub in (one, two)])
        found.join(CPU)
        joined = [b["args"] for s in (one, two) for _, b in s.seen if (b or {}).get("args")]
        assert joined == [[found.run_id, None, [rank, 3], 150.0] for rank in (1, 2)]
        started = time.monotonic()
        one.routes[WEIGHTS_ROUTE], two.routes[WEIGHTS_ROUTE] = slow, [failed]
        words = "While sending the weights of step 4, at a, after 0 weights: .*status 500: of a w"
        with pytest.raises(ServerError, match=words):
            found.send(iter([("a", torch.zeros(1))]), 4)
        one.routes["/collective_rpc"], two.routes["/collective_rpc"] = slow, [failed]
        with pytest.raises(ServerError, match="of a worker"):
            found.join(CPU)
        hangs.set()
        assert time.monotonic() - started < 50


def test_what_a_worker_finds_wrong_is_told_and_the_servers_are_not_left():
    with stub_server(routes() | {WEIGHTS_ROUTE: [(200, "")]}) as stub:
        found = ServerPool([Server(stub.url, 5.0)])
        found.join(CPU)
        own = stub.routes["/collective_rpc"]
        stub.routes["/collective_rpc"] = workers(trl_prove=["a differs from what was sent", None])
        weights = [("a", torch.zeros(1))]
        assert found.send(iter(weights), 0) == "a differs from what was sent"
        stub.routes |= {"/collective_rpc": own, "/reset_prefix_cache": [(200, "")]}
        assert found.send(iter(weights), 0) is None


def test_prompts_are_divided_and_answers_put_in_order():
    held = []
    with stub_server(routes(trl_held=held)) as one, stub_server(routes(trl_held=held)) as two:
        found = ServerPool([Server(stub.url, 5.0) for stub in (one, two)])
        held[:] = [found.run_id, 0]
        requests = [CompletionRequest([10 * place], 2, place) for place in range(1, 6)]
        rows = found.complete(requests, Sampling(max_tokens=1))
        assert rows.completion_ids == [[10], [11], [20], [21], [30], [31], [40], [41], [50], [51]]
        asked = [[b["seed"] for p, b in s.seen if p == "/v1/completions"] for s in (one, two)]
        assert [sorted(seeds) for seeds in asked] == [[1, 3, 5], [2, 4]]


def test_a_refused_request_ends_the_others():
    with stub_server(routes() | {"/v1/completions": [(400, "too long")]}) as stub:
        found = ServerPool([Server(stub.url, 5.0)])
        words = "While generating, with 0 of 2 prompts answered: .*status 400: too long"
        with pytest.raises(ServerError, match=words):
            found.complete([CompletionRequest([1], 1, 0)] * 2, Sampling(max_tokens=1))


@pytest.mark.parametrize("count", [300])
def test_threads_do_not_grow_with_prompts(monkeypatch, count):
    """Those of the client and those that the server starts, one for each request under way."""
    monkeypatch.setattr(server_backend, "MAX_CONCURRENT_REQUESTS", 8)
    seen, held = [], []

    def slow(body):
        time.sleep(0.001)
        seen.append(threading.active_count())
        return completed(body)

    before = threading.active_count()
    with stub_server(routes(trl_held=held) | {"/v1/completions": [(200, slow)]}) as stub:
        found = ServerPool([Server(stub.url, 30.0)])
        held[:] = [found.run_id, 0]
        requests = [CompletionRequest([place], 1, place) for place in range(count)]
        rows = found.complete(requests, Sampling(max_tokens=1))
    assert rows.completion_ids == [[place] for place in range(count)]
    # A thread of the server ends a moment after its answer, and one serves while another ends.
    assert max(seen) <= before + 1 + 3 * 8


def test_busy_servers_are_asked_again_by_the_same_threads(monkeypatch):
    monkeypatch.setattr(server_backend, "MAX_CONCURRENT_REQUESTS", 2)
    held = []
    answers = [(503, "busy")] * 5 + [(200, completed)]
    with stub_server(routes(trl_held=held) | {"/v1/completions": answers}) as stub:
        found = ServerPool([Server(stub.url, 30.0)])
        held[:] = [found.run_id, 0]
        requests = [CompletionRequest([place], 1, place) for place in range(6)]
        rows = found.complete(requests, Sampling(max_tokens=1))
        assert rows.completion_ids == [[place] for place in range(6)]
        assert [path for path, _ in stub.seen].count("/v1/completions") == 6 + 5


def test_after_a_failure_nothing_more_is_asked(monkeypatch):
    monkeypatch.setattr(server_backend, "MAX_CONCURRENT_REQUESTS", 2)
    with stub_server(routes() | {"/v1/completions": [(400, "too long")]}) as stub:
        found = ServerPool([Server(stub.url, 5.0)])
        with pytest.raises(ServerError, match="answered: .*status 400: too long"):
            found.complete([CompletionRequest([1], 1, 0)] * 50, Sampling(max_tokens=1))
        time.sleep(0.3)
        assert [path for path, _ in stub.seen].count("/v1/completions") <= 4


# --- The backend ---


@pytest.fixture
def backend():
    """Over a server that answers requests, but that this process has not joined."""
    with stub_server(routes() | {"/v1/completions": [(400, "too long")]}) as stub:
        pool = ServerPool([Server(stub.url, 5.0)])
        yield lambda weights=None: VLLMServerBackend(pool, POLICY, weights=weights)


def test_an_error_of_the_policy_is_not_taken_for_one_of_the_server(backend):
    def weights(model):
        yield "a", torch.zeros(1)
        raise KeyError("of the policy")

    with pytest.raises(KeyError, match="of the policy"):
        backend(weights).generate(PROMPTS, ONE, 1)


def test_all_weights_are_walked_through_though_none_can_be_sent(backend):
    walked = []

    def weights(model):
        for name in "abc":
            walked.append(name)
            yield name, torch.zeros(1)

    with pytest.raises(ServerError, match="the servers were disconnected after a failure"):
        backend(weights).generate(PROMPTS, ONE, 1)
    assert walked == ["a", "b", "c"]


def test_the_answer_of_the_server_ends_a_generation(backend):
    with pytest.raises(ServerError, match="While generating, .* status 400: too long"):
        backend()._run_requests([CompletionRequest([9], 1, 1)], ONE)
