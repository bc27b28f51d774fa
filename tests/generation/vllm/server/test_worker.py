"""Taking weights, in a worker of the test; tests/vllm_cpu has those of a real server."""

import pytest
import torch
from torch import nn

from trl.generation.vllm.server.weight_stream import unpack_message, weight_batches
from trl.imports import is_available

CPU = torch.device("cpu")

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
def receiver():
    from trl.generation.vllm.server.worker import WeightReceiver

    return WeightReceiver("run", Model())


def sync(receiver, number, weights):
    """What is wrong after a sync."""
    for batch in weight_batches(weights.items(), torch.device("cpu")):
        receiver.receive(*unpack_message(batch.to_message("run")))
    problem, doubt = receiver.verify(number)
    assert doubt is None
    return problem


def test_weights_are_loaded_and_held(receiver):
    weight = torch.randn(3, 2)
    assert sync(receiver, 1, {"weight": weight}) is None
    assert torch.equal(receiver._model.weight, weight) and receiver.held_sync == 1


def test_a_change_on_the_way_is_seen_whatever_the_number_of_threads(receiver):
    """Sums of floats depend on the number of threads, so nothing that is compared may be one."""
    (batch,) = weight_batches([("other", torch.randn(40_000)), ("weight", torch.ones(3, 2))], CPU)
    message, threads = bytearray(batch.to_message("run")), torch.get_num_threads()
    message[-1] ^= 1
    try:
        torch.set_num_threads(threads + 1)
        receiver.receive(*unpack_message(bytes(message)))
    finally:
        torch.set_num_threads(threads)
    assert receiver.verify(1)[0] == "other or one of 1 more in its batch was damaged in transfer"
    assert receiver.held_sync is None
    assert sync(receiver, 2, {"weight": torch.ones(3, 2)}) is None


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({}, "6 of 6 entries of the engine's weight were not loaded"),
        ({"other": torch.zeros(1), "weight": torch.zeros(3, 2)}, "other cannot be loaded"),
        ({"weight": torch.zeros(2, 2)}, "weight cannot be loaded (RuntimeError"),
    ],
)
def test_a_problem_is_told_and_ends_with_the_next_sync(receiver, weights, words):
    assert sync(receiver, 1, weights).startswith(words)
    assert receiver.held_sync is None
    assert sync(receiver, 2, {"weight": torch.ones(3, 2)}) is None
    assert receiver.held_sync == 2


def test_another_trainer_is_not_taken_for_the_one_that_was_met(receiver):
    from trl.generation.vllm.server.worker import WeightWorker

    worker = WeightWorker()
    assert worker.trl_held() == []
    worker._trl_receiver = receiver
    assert worker.trl_held() == []
    receiver.held_sync = 4
    assert worker.trl_held() == ["run", 4]
    (batch,) = weight_batches([("weight", torch.ones(3, 2))], CPU)
    for call in (
        lambda: worker.trl_prove("another run", 5),
        lambda: worker.trl_receive(batch.to_message("another run")),
    ):
        with pytest.raises(RuntimeError, match="Another trainer has connected to this server"):
            call()
    assert worker.trl_held() == ["run", 4]
