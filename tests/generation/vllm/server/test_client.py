"""HTTP with servers that are slow, busy, silent or gone; tests/vllm_cpu talks to a real one."""

import dataclasses
import math
import re
import threading
import time
from functools import partial

import pytest
import torch
from stub_server import stub_server
from tiny import tiny_model

from trl.generation.vllm.server import client as vllm_client
from trl.generation.vllm.server.client import (
    PROTOCOL,
    SecretError,
    ServerError,
    ServerFacts,
    VLLMClient,
    gpu_id,
    incompatibilities,
    model_shape,
    poll,
    run_in_background,
    run_in_threads,
)

FAILED = {"error": {"message": "Worker failed with error 'x'", "code": 500}}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(vllm_client, "RETRY_PAUSES", (0.01,) * 4)
    monkeypatch.setattr(vllm_client, "POLL_SECONDS", 0.02)


@pytest.mark.parametrize(
    ("url", "expected", "host", "port"),
    [
        ("http://a:81", "http://a:81", "a", 81),
        ("http://a/vllm/", "http://a/vllm", "a", 80),
        ("https://a", "https://a", "a", 443),
        ("a:81", "http://a:81", "a", 81),
        ("http://0.0.0.0:8000", "http://0.0.0.0:8000", "127.0.0.1", 8000),
        ("http://[::1]:8000", "http://[::1]:8000", "::1", 8000),
    ],
)
def test_addresses(url, expected, host, port):
    found = VLLMClient(url, 1.0)
    assert (found.url, found.host, found.port) == (expected, host, port)


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:no"])
def test_addresses_that_are_none(url):
    with pytest.raises(ValueError, match="vllm_server_base_url: .* is not an address such as"):
        VLLMClient(url, 1.0)


def test_answers_and_what_was_asked():
    with stub_server({"/vllm/x": [(200, {"a": 1})], "/vllm/y": [(200, "")]}) as stub:
        found = VLLMClient(f"{stub.url}/vllm", 5.0)
        assert found.request("POST", "/x", {"b": [2]}) == {"a": 1}
        assert found.request("GET", "/y", seconds=math.inf) is None
        assert stub.seen == [("/vllm/x", {"b": [2]}), ("/vllm/y", None)]


def test_an_error_has_status_and_words():
    with stub_server({"/collective_rpc": [(500, FAILED)], "/x": [(400, "plain")]}) as stub:
        found = VLLMClient(stub.url, 5.0)
        with pytest.raises(ServerError, match="/collective_rpc with status 500: Worker failed"):
            found.call_workers("method")
        with pytest.raises(ServerError, match="GET /x with status 400: plain") as caught:
            found.request("GET", "/x")
        assert caught.value.status == 400
        assert len(stub.seen) == 2, "what may not be repeated is not"


@pytest.mark.parametrize("status", [500, 502, 503])
def test_a_busy_server_is_asked_again(status):
    with stub_server({"/x": [(status, ""), (status, ""), (200, {"a": 1})]}) as stub:
        assert VLLMClient(stub.url, 5.0).request_with_retries("GET", "/x") == {"a": 1}
        assert len(stub.seen) == 3


def test_asking_again_ends():
    with stub_server({"/x": [(503, "no")], "/y": [(400, "no")]}) as stub:
        found = VLLMClient(stub.url, 5.0)
        for path, times in (("/x", 5), ("/y", 1)):
            with pytest.raises(ServerError, match="no"):
                found.request_with_retries("GET", path)
            assert [asked for asked, _ in stub.seen].count(path) == times


def test_a_server_that_gives_no_answer():
    gives_up = pytest.raises(ServerError, match="gave no answer within 0.1 s, asked for /x")
    with stub_server({"/x": [(200, lambda body: time.sleep(1.0))]}) as stub, gives_up:
        VLLMClient(stub.url, 0.1).request("GET", "/x")


def test_health_is_waited_for():
    with stub_server({"/health": [(503, ""), (500, ""), (200, "")]}) as stub:
        VLLMClient(stub.url, 5.0).wait_until_healthy()
        assert len(stub.seen) == 3


def test_waiting_for_health_ends(free_port):
    words = (
        f"No vLLM server was ready at http://127.0.0.1:{free_port} within vllm_server_timeout=0.3 "
        r"s. Start it with `trl vllm-serve`.*Connection ?[rR]efused"
    )
    with pytest.raises(ServerError, match=words):
        VLLMClient(f"http://127.0.0.1:{free_port}", 0.3).wait_until_healthy()


def test_a_cache_that_requests_hold_is_dropped_later():
    kept, dropped = (200, {"success": False}), (200, {"success": True})
    with stub_server({"/reset_prefix_cache": [kept, kept, dropped]}) as stub:
        VLLMClient(stub.url, 5.0).reset_prefix_cache()
        assert len(stub.seen) == 3
    gives_up = pytest.raises(ServerError, match="could not reset its prefix cache within 0.1 s")
    with stub_server({"/reset_prefix_cache": [kept]}) as stub, gives_up:
        VLLMClient(stub.url, 0.1).reset_prefix_cache()
    with stub_server({"/reset_prefix_cache": [(200, "")]}) as stub:
        VLLMClient(stub.url, 1.0).reset_prefix_cache()


def test_what_does_not_prove_the_secret_is_not_believed():
    with stub_server({"/health": [(200, "")], "/x": [(200, {"a": 1})], "/y": [(502, "")]}) as stub:
        stub.proves = False
        found = VLLMClient(stub.url, 300.0)
        started = time.monotonic()
        for ask in (lambda: found.request("GET", "/x"), found.wait_until_healthy):
            with pytest.raises(SecretError, match="did not prove .* Give TRL_VLLM_TOKEN the same"):
                ask()
        assert time.monotonic() - started < 150, "waiting longer would not help"
        with pytest.raises(ServerError, match="status 502.$") as caught:
            found.request("GET", "/y")
        assert not isinstance(caught.value, SecretError), "a proxy may be waiting for the server"


def test_closing_ends_requests_that_are_under_way():
    closed = threading.Event()
    with stub_server({"/x": [(200, lambda body: closed.wait(60))]}) as stub:
        found = VLLMClient(stub.url, 60.0)
        call = run_in_background(lambda: found.request("GET", "/x", seconds=math.inf))
        while not stub.seen:
            time.sleep(0.005)
        found.close()
        with pytest.raises(ServerError, match="is gone"):
            call.result(30)
        closed.set()


WANTED = ServerFacts(
    protocol=PROTOCOL,
    vllm="0.32.0",
    shape={"model_type": "llama", "hidden_size": 64},
    dtype="float32",
    context=9,
    logprobs_mode="processed_logprobs",
    workers=1,
    gpu="GPU-1",
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vllm": "0.32.5"},
        {"context": 4096},
        {"workers": 8},
        {"gpu": "GPU-2"},
        {"gpu": None},
        {"shape": WANTED.shape | {"more": 1}},
    ],
)
def test_a_server_that_fits(changes):
    assert (
        list(incompatibilities(dataclasses.replace(WANTED, **({"gpu": "GPU-0"} | changes)), WANTED))
        == []
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": 0}, "another version of trl"),
        ({"vllm": "0.31.1"}, "runs vLLM 0.31.1 and the trainer 0.32.0"),
        ({"shape": {"model_type": "qwen3", "hidden_size": 64}}, "model_type=qwen3 .* llama"),
        ({"shape": {"model_type": "llama"}}, "hidden_size=None and the policy 64"),
        ({"dtype": "bfloat16"}, "in bfloat16 and the policy in float32: .* --dtype float32"),
        ({"logprobs_mode": "raw_logprobs"}, "raw_logprobs: .* --logprobs-mode processed_logprobs"),
        (
            {"context": 8},
            "context of 8 tokens, but max_completion_length=8 .*larger --max_model_len",
        ),
        ({"gpu": "GPU-1"}, "on the GPU that trains"),
    ],
)
def test_a_server_that_does_not_fit(changes, words):
    server = dataclasses.replace(WANTED, **({"gpu": "GPU-0"} | changes))
    (reason,) = incompatibilities(server, WANTED)
    assert re.search(words, reason), reason


def test_cpus_are_not_told_apart():
    cpu = dataclasses.replace(WANTED, gpu=gpu_id(torch.device("cpu")))
    assert cpu.gpu is None and list(incompatibilities(cpu, cpu)) == []


def test_shapes_tell_models_apart():
    shapes = [
        model_shape(tiny_model(kind, **changes).config)
        for kind, changes in (
            ("llama", {}),
            ("qwen3", {}),
            ("llama", {"num_hidden_layers": 3}),
            ("llama", {"tie_word_embeddings": True}),
        )
    ]
    assert all(a != b for place, a in enumerate(shapes) for b in shapes[:place])
    assert shapes[0] == model_shape(tiny_model(seed=5).config)


def test_facts_travel_as_json():
    assert ServerFacts(**dataclasses.asdict(WANTED)) == WANTED


# --- Waiting that ends ---


def test_looks_end_and_there_is_one_at_least():
    found = list(poll(0.05, 0.02))
    assert found and found[0] == 0.05 and found == sorted(found, reverse=True)
    assert list(poll(0.0, 60.0)) == list(poll(-1.0, 60.0)) == [0.0]


def test_pauses_are_equal_or_double_up_to_a_bound_and_none_is_longer_than_what_is_left(
    monkeypatch,
):
    pauses, now = [], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda t: (pauses.append(t), now.__setitem__(0, now[0] + t)))
    list(poll(12.0, 1.0, max_pause=4.0))
    assert pauses == [1.0, 2.0, 4.0, 4.0, 1.0]
    pauses.clear()
    list(poll(3.5, 1.0))
    assert pauses == [1.0, 1.0, 1.0, 0.5]


def test_errors_of_the_background_are_kept():
    assert run_in_background(lambda: 3).result(60) == 3
    with pytest.raises(ZeroDivisionError):
        run_in_background(lambda: 1 // 0).result(60)


def test_works_wait_for_one_of_few_threads():
    at_once, most, names = threading.Semaphore(3), [], set()

    def work(place):
        assert at_once.acquire(blocking=False), "a fourth one runs"
        names.add(threading.current_thread().name)
        time.sleep(0.001)
        at_once.release()
        most.append(place)
        return place

    futures = run_in_threads([partial(work, place) for place in range(30)], 3)
    assert [future.result(60) for future in futures] == list(range(30))
    assert len(names) == 3 and len(most) == 30
    assert run_in_threads([], 3) == []


def test_works_behind_one_that_failed_are_not_begun():
    begun = []

    def work(place):
        begun.append(place)
        return 1 / (2 - place)

    futures = run_in_threads([partial(work, place) for place in range(9)], 1)
    with pytest.raises(ZeroDivisionError):
        futures[2].result(60)
    assert [future.result(60) for future in futures[:2]] == [0.5, 1.0]
    time.sleep(0.05)
    assert begun == [0, 1, 2] and not futures[3].done()


@pytest.mark.parametrize("allowed", [0, 2])
def test_fewer_threads_than_wanted_do_all(monkeypatch, allowed):
    """What a container with a limit of processes does to the next thread."""
    start, started = threading.Thread.start, []

    def limited(thread):
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    if not allowed:
        with pytest.raises(RuntimeError, match="can't start"):
            run_in_threads([int] * 9, 5)
        return
    assert [future.result(60) for future in run_in_threads([int] * 9, 5)] == [0] * 9
    assert len(started) == 2
