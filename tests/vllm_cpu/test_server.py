"""Weights and requests that go to a real server, and what it says when something is wrong."""

import threading
import time

import pytest
import torch
from backend_contract import BackendContract, model_logps
from shared_vllm import needs_vllm, nudge, policy_model
from vllm_rows import (
    DOWN,
    PROMPTS,
    K,
    Q,
    check_fault_is_found,
    check_missing_weight_is_found,
    check_stop,
    gap,
    sampling,
)
from vllm_server import connected_pool, server_backend, shared_server

from trl.generation.base import Sampling
from trl.generation.vllm.server.backend import MAX_CONCURRENT_REQUESTS, ServerPool
from trl.generation.vllm.server.client import ServerError, VLLMClient
from trl.generation.vllm.server.secret import WEIGHTS_ROUTE
from trl.generation.vllm.weight_verifier import WeightSyncError
from trl.types import Prompts

pytestmark = [needs_vllm, pytest.mark.vllm]


@pytest.fixture(autouse=True)
def no_fault():
    yield
    shared_server().fault()


class TestServer(BackendContract):
    model = policy_model(seed=3)
    rounding = 1e-5  # requests come one by one, so the server batches them as it likes

    @pytest.fixture
    def backend(self):
        return server_backend(self.model)

    def logps(self, prompt, completion, temperature):
        return model_logps(self.model, prompt, completion, temperature)


# --- Requests ---


def test_options_of_requests_are_followed():
    model = policy_model()
    found = server_backend(model)
    greedy = found.generate(PROMPTS, sampling(extra={"do_sample": False}, max_tokens=3), 4)
    ids = list(PROMPTS.token_ids[0])
    for token in greedy.completion_ids[0]:
        assert token == model(torch.tensor([ids])).logits[0, -1].argmax()
        ids.append(token)
    assert greedy.completion_ids == [greedy.completion_ids[0]] * 4 and len(ids) == 43
    biased = found.generate(PROMPTS, sampling(extra={"logit_bias": {"33": 100.0}}), 4)
    assert biased.completion_ids == [[33] * 12] * 4
    digits = sampling(extra={"structured_outputs": {"regex": "[0-9]{3}"}}, stop_ids=(1,))
    text = found.generate(PROMPTS, digits, 4)
    assert {len(ids) for ids in text.completion_ids} == {4} and text.finish_reasons == ["stop"] * 4


def test_filters_change_the_reported_log_probabilities_as_they_change_the_distribution():
    model = policy_model()
    found = server_backend(model).generate(PROMPTS, sampling(top_k=5, temperature=0.7), 4)
    for ids, logps in zip(found.completion_ids, found.sampling_logps, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPTS.token_ids[0], *ids]])).logits[0, 39:-1] / 0.7
        least = logits.topk(5).values[:, -1:]
        kept = logits.masked_fill(logits < least, -torch.inf).log_softmax(-1)
        expected = kept[torch.arange(len(ids)), torch.tensor(ids)]
        assert torch.allclose(torch.tensor(logps), expected, atol=1e-4)


def test_one_request_for_each_prompt_and_no_more_tokens_than_there_is_room_for(monkeypatch):
    found, bodies = server_backend(policy_model(), probe_syncs=0), []
    client = found._pool.servers[0]
    ask = client.request_with_retries
    monkeypatch.setattr(client, "request_with_retries", lambda *a: bodies.append(a[2]) or ask(*a))
    rows = Prompts(messages=list("aaabbb"), token_ids=[[20] * 120] * 3 + [[21]] * 3)
    drawn = found.generate(rows, sampling(seeds=tuple(range(6)), max_tokens=200), 3)
    assert [len(ids) for ids in drawn.completion_ids] == [8] * 3 + [127] * 3
    bodies.sort(key=lambda body: body["seed"])
    assert [(body["prompt"], body["n"], body["seed"]) for body in bodies] == [
        ([20] * 120, 3, 0),
        ([21], 3, 3),
    ]


# --- Weights ---


def test_many_prompts_are_asked_by_few_threads_and_answered_as_alone():
    model = policy_model()
    found = server_backend(model)
    many = Prompts(messages=["x"] * 600, token_ids=[[place % 50 + 2] for place in range(600)])
    most, ask = [], VLLMClient.request

    def counted(*args, **options):
        most.append(threading.active_count())
        return ask(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VLLMClient, "request", counted)
        before = threading.active_count()
        rows = found.generate(many, greedy_of(600), 1)
    assert len(most) >= 600 and max(most) <= before + MAX_CONCURRENT_REQUESTS
    expected = [
        int(model(torch.tensor([ids])).logits[0, -1].argmax()) for ids in many.token_ids[:50]
    ]
    assert [ids[0] for ids in rows.completion_ids] == expected * 12


def greedy_of(rows):
    return Sampling(max_tokens=1, seeds=tuple(range(rows)), extra={"do_sample": False})


def test_text_changes_after_a_step_and_log_probabilities_follow():
    """The prompt is longer than a block of the cache, which must be dropped with the weights."""
    model = policy_model()
    found = server_backend(model)
    before = found.generate(PROMPTS, sampling(), 4)
    assert gap(model, before) <= 1e-4
    nudge(model)
    found.sync_weights(1)
    after = found.generate(PROMPTS, sampling(), 4)
    assert after.completion_ids != before.completion_ids
    assert gap(model, after) <= 1e-4 < gap(model, before)


def test_weights_that_did_not_move_are_sent_once(monkeypatch):
    found, sent = server_backend(policy_model()), []
    send = ServerPool.send
    monkeypatch.setattr(ServerPool, "send", lambda self, w, s: sent.append(s) or send(self, w, s))
    for step in (4, 4, 5):
        found.sync_weights(step)
        with found.awake():
            found.generate(PROMPTS, sampling(), 4)
    assert sent == [4, 5]


@pytest.mark.parametrize("name", [Q, K, DOWN])
@pytest.mark.parametrize("fault", ["skip", "stale"])
def test_a_weight_that_was_not_loaded_stops_training(fault, name):
    shared_server().fault(fault, name, first=2)
    check_fault_is_found(server_backend, name)


def test_a_transposed_weight_stops_training():
    """A square one: the name is that of the projection after attention of a wider model."""
    name = "model.layers.0.mlp.gate_proj.weight"
    shared_server().fault("transposed", name, first=2)
    found = server_backend(policy_model(), probe_syncs=0)
    found.generate(PROMPTS, sampling(), 4)
    check_stop(found, f"{name} differs from what was sent")


def test_a_weight_that_is_not_sent_stops_training():
    check_missing_weight_is_found(server_backend)


def test_a_weight_that_changes_on_the_way_stops_training(monkeypatch):
    """No byte of a message can be changed by who does not know the secret."""
    send, found = VLLMClient._send, server_backend(policy_model())

    def changed(self, method, path, content, *others):
        if path == WEIGHTS_ROUTE:
            content = content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]
        return send(self, method, path, content, *others)

    monkeypatch.setattr(VLLMClient, "_send", changed)
    with pytest.raises(
        ServerError,
        match=f"at model.embed.*POST {WEIGHTS_ROUTE} with status 400: .*altered or damaged",
    ):
        found.generate(PROMPTS, sampling(), 4)


def test_old_weights_sent_as_new_ones_show_in_log_probabilities():
    model, old = policy_model(), policy_model()
    found = server_backend(model, weights=lambda _: iter(old.named_parameters()))
    found.generate(PROMPTS, sampling(), 4)
    nudge(model)
    found.sync_weights(1)
    with pytest.raises(WeightSyncError, match="log-probabilities of a probe differ by"):
        found.generate(PROMPTS, sampling(), 4)


def test_a_weight_that_the_model_has_no_place_for_is_named():
    shared_server().fault("refused", K)
    words = f"{K} cannot be loaded .ValueError: no such place"
    with pytest.raises(WeightSyncError, match=words):
        server_backend(policy_model()).generate(PROMPTS, sampling(), 4)


def test_training_can_go_on_after_a_sync_that_failed():
    model, skipped = policy_model(), [Q]
    some = lambda model: ((n, p) for n, p in model.named_parameters() if n not in skipped)  # noqa: E731
    found = server_backend(model, weights=some)
    with pytest.raises(WeightSyncError, match="entries of the engine's"):
        found.generate(PROMPTS, sampling(), 4)
    skipped.clear()
    assert gap(model, found.generate(PROMPTS, sampling(), 4)) <= 1e-4


# --- Servers that are taken away, and such that hang ---


def test_a_server_that_lost_its_weights_is_found_out():
    found = server_backend(policy_model())
    found.generate(PROMPTS, sampling(), 4)
    shared_server().connect().call_workers("trl_test_zero")
    with pytest.raises(WeightSyncError, match="does not hold the weights.*it was restarted or"):
        found.generate(PROMPTS, sampling(), 4)


def test_a_server_that_another_trainer_has_taken_is_not_used():
    first, model = server_backend(policy_model()), policy_model(seed=1)
    first.generate(PROMPTS, sampling(), 4)
    second = server_backend(model)
    with pytest.raises(WeightSyncError, match="serves another trainer"):
        first.generate(PROMPTS, sampling(), 4)
    first, third = server_backend(policy_model()), server_backend(model)
    with pytest.raises(ServerError, match="Another trainer has connected to this server since"):
        first.generate(PROMPTS, sampling(), 4)
    with pytest.raises(ServerError, match="Another trainer has connected"):
        second.generate(PROMPTS, sampling(), 4)
    assert gap(model, third.generate(PROMPTS, sampling(), 4)) <= 1e-4


def test_a_worker_that_hangs_while_weights_are_sent_ends_the_wait():
    found = server_backend(policy_model(), pool=connected_pool(seconds=1.5))
    shared_server().fault("slow", K)
    started = time.monotonic()
    words = r"While sending the weights of step 0, (at model|after the last).*: .* (1.5|.*gone)"
    with pytest.raises(ServerError, match=words):
        found.generate(PROMPTS, sampling(), 4)
    assert time.monotonic() - started < 100


def test_an_engine_that_hangs_while_generating_ends_the_wait(tmp_path):
    found = server_backend(policy_model(), pool=connected_pool(seconds=1.5), probe_syncs=0)
    with found.awake():
        pass
    file = tmp_path / "hangs"
    file.touch()
    shared_server().connect().call_workers("trl_test_hang", str(file))
    started = time.monotonic()
    try:
        with pytest.raises(ServerError, match="While generating, with 0 of 1 prompts answered"):
            found.generate(PROMPTS, sampling(), 4)
        assert time.monotonic() - started < 100
    finally:
        file.unlink()


def test_an_engine_that_is_slow_is_waited_for(tmp_path):
    """Longer than the deadline, since it goes on with its work."""
    found = server_backend(policy_model(), pool=connected_pool(seconds=0.6), probe_syncs=0)
    with found.awake():
        pass
    client = shared_server().connect()
    client.call_workers("trl_test_pause", 0.15)
    try:
        started = time.monotonic()
        found.generate(PROMPTS, sampling(), 4)
        assert time.monotonic() - started > 1.5
    finally:
        client.call_workers("trl_test_pause", 0.0)
