"""Servers that are killed while something depends on them; each is started for that."""

import threading
import time
from pathlib import Path

import pytest
from distributed.engines import launch
from shared_vllm import needs_vllm, policy_model
from vllm_cpu.test_server_training import completions, trainer_of
from vllm_server import (
    START,
    RunningServer,
    connected_pool,
    server_backend,
    shared_server,
)

from trl.generation.base import Sampling
from trl.generation.vllm.server.client import ServerError
from trl.models.weights import full_weights
from trl.types import Prompts

pytestmark = [needs_vllm, pytest.mark.vllm, pytest.mark.slow, pytest.mark.distributed]
HERE = Path(__file__).parent
K = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def started():
    """Servers that a test has left running, since starting one takes long."""
    found = []
    yield found
    for server in found:
        server.kill()


def test_a_run_goes_on_with_a_server_that_was_started_again(tmp_path, started):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    trainer_of(tmp_path / "whole", **settings).train()
    server = RunningServer()
    server.connect()
    trainer = trainer_of(tmp_path / "cut", server=server, **settings)
    walks = []

    def weights(model):
        walks.append(1)
        for name, weight in full_weights(model):
            if name == K and len(walks) == 3:
                server.kill()
            yield name, weight

    trainer.backend.weights = weights
    begun = time.monotonic()
    # Small weights may all be on their way before the process that takes them has ended.
    words = "While sending the weights of step 2, (at model|after the last).*: The vLLM server"
    with pytest.raises(ServerError, match=words):
        trainer.train()
    assert time.monotonic() - begun < 300
    again = RunningServer(port=server.port)
    again.connect()
    started.append(again)
    trainer = trainer_of(tmp_path / "cut", server=again, **settings)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    assert completions(tmp_path / "cut") == completions(tmp_path / "whole")


def test_a_server_that_dies_ends_both_ranks(tmp_path, started):
    """Before that, both train with it and with another one, among which requests are divided."""
    server, other = (started or [RunningServer()])[-1], shared_server()
    for each in (server, other):
        each.connect()
    file = tmp_path / "hangs"
    killer = threading.Thread(target=kill_once, args=(server, file.with_suffix(".seen")))
    killer.start()
    words = f"{other.url},{server.url}"
    first, second = launch(HERE / "server_ranks.py", "ddp", tmp_path, words, file, vllm=True)
    killer.join(START)
    assert first["steps"] == second["steps"] == 2
    assert max(first["gaps"]) <= 1e-4
    assert first["kind"] == "ServerError" and second["kind"] == "RankError"
    assert first["error"].startswith("While generating, with")
    assert f"The vLLM server {server.url} cannot be reached or is gone" in first["error"]
    assert second["error"].startswith("Rank 0 failed in generation: ServerError: While generating")
    assert max(first["seconds"], second["seconds"]) < 300
    assert first["served"] == [9, 9], "in three rounds: 2 of 4 prompts and a probe for each server"


def kill_once(server, file):
    """Kill a server once a step of its model has begun."""
    end = time.monotonic() + START
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.01)
    server.kill()


def test_a_server_that_stops_answering_is_given_up(tmp_path):
    """Connections to it stay open, as when a machine hangs."""
    found = server_backend(policy_model(), pool=connected_pool(seconds=1.5), probe_syncs=0)
    prompts = Prompts(messages=["a"], token_ids=[[20, 21]])
    with found.awake(), shared_server().stopped():
        started = time.monotonic()
        with pytest.raises(ServerError, match="While generating.*no answer within"):
            found.generate(prompts, Sampling(max_tokens=4, seeds=(1,)), 1)
        assert time.monotonic() - started < 100
