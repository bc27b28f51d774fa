"""Batches of weights as messages, and the group over which GPUs hand on their bytes."""

import threading
import time

import pytest
import torch

from trl.distributed import _comes_from_collective
from trl.generation.vllm.server import weight_stream
from trl.generation.vllm.server.client import poll, run_in_background
from trl.generation.vllm.server.weight_stream import (
    TransferError,
    WeightBatch,
    WeightGroup,
    unpack_message,
    weight_batches,
)
from trl.generation.vllm.weight_verifier import fingerprint

CPU = torch.device("cpu")
WEIGHTS = {
    "flag": torch.tensor(True),
    "plain": torch.arange(12.0).view(3, 4),
    "turned": torch.arange(12.0).view(3, 4).T,
    "half": torch.randn(7).bfloat16(),
    "empty": torch.zeros(0, 3),
    "numbers": torch.arange(5),
}


def check_weights(found):
    assert list(found) == list(WEIGHTS)
    for name, weight in found.items():
        assert weight.dtype == WEIGHTS[name].dtype and torch.equal(weight, WEIGHTS[name])


@pytest.mark.parametrize("size", [0, 30, 60, 2**26])
def test_weights_of_any_kind_travel_in_messages(monkeypatch, size):
    """None is taken from memory that the next one has by then."""
    monkeypatch.setattr(weight_stream, "BATCH_BYTES", size)
    room, found = torch.empty(100, dtype=torch.uint8), {}

    def stream():
        for name, weight in WEIGHTS.items():
            flat = weight.contiguous().reshape(-1).view(torch.uint8)
            room[: len(flat)] = flat
            yield name, room[: len(flat)].view(weight.dtype).view(weight.shape)

    for batch in weight_batches(stream(), CPU):
        head, body = unpack_message(batch.to_message("a run"))
        assert head["run"] == "a run" and head["size"] == len(body) == len(batch.flat)
        flat = torch.frombuffer(bytearray(body), dtype=torch.uint8) if len(body) else batch.flat
        assert fingerprint(flat).item() == head["fingerprint"]
        assert len(body) <= max(size, 48)
        found |= dict(WeightBatch(head["headers"], flat).weights())
    check_weights(found)


class StandIn:
    """What torch's NCCL group does with its store, on CPUs: members who know its identity meet."""

    boards = {}  # what was broadcast, by identity and number
    is_stuck = False

    def __init__(self, store, rank, size, timeout):
        self.store, self.rank, self.count = store, rank, 0
        assert timeout.total_seconds() == 10

    def broadcast(self, tensors, options):
        assert options.rootRank == 0
        if self.rank == 0 and not self.count:
            self.store.set("0", threading.get_ident().to_bytes(8, "big") + bytes(range(128, 256)))
        key, self.count = (self.store.get("0"), self.count), self.count + 1
        if self.rank == 0:
            self.boards[key] = tensors[0].clone()
        for _ in poll(5, 0.001):
            if key in self.boards:
                tensors[0].copy_(self.boards[key])
                break
        return self

    def is_completed(self):
        return not self.is_stuck

    def wait(self):
        return True

    def abort(self):
        pass


@pytest.fixture
def pair(monkeypatch):
    """A trainer's group and a worker's."""
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", StandIn, raising=False)
    host = WeightGroup(0, 2, CPU, 5.0, None)
    worker = WeightGroup(1, 2, CPU, 5.0, host.nccl_id)
    for group in (host, worker):
        group.wait_for_all()
    yield host, worker
    host.close()


def test_members_that_are_told_the_identity_meet_and_hand_on_bytes(pair):
    host, worker = pair
    flat = torch.arange(50, dtype=torch.uint8)
    found = torch.zeros_like(flat)
    taken = run_in_background(lambda: worker.broadcast(found))
    host.broadcast(flat)
    taken.result(60)
    assert torch.equal(found, flat) and host.nccl_id == worker.nccl_id
    host.broadcast(flat[:0])


def test_a_transfer_that_does_not_move_ends_and_is_no_lost_rank_of_training(pair):
    host, _ = pair
    host.seconds, host._nccl.is_stuck = 0.2, True
    with pytest.raises(TransferError, match="nothing moved for 0.2 s") as caught:
        host.broadcast(torch.zeros(3, dtype=torch.uint8))
    assert not _comes_from_collective(caught.value)


def test_a_member_that_failed_ends_the_wait(pair):
    host, _ = pair
    host._nccl.is_stuck = True

    def failed():
        raise KeyError("of a worker")

    started = time.monotonic()
    with pytest.raises(KeyError, match="of a worker"):
        host.broadcast(torch.zeros(3, dtype=torch.uint8), failed)
    assert time.monotonic() - started < 4


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL between them")
def test_weights_go_from_gpu_to_gpu():
    host = WeightGroup(0, 2, torch.device("cuda:0"), 60.0, None)
    worker = run_in_background(
        lambda: WeightGroup(1, 2, torch.device("cuda:1"), 60.0, host.nccl_id)
    )
    host.wait_for_all()
    found = torch.zeros(48, dtype=torch.uint8, device="cuda:1")
    taken = run_in_background(lambda: worker.result(60).broadcast(found))
    (batch,) = weight_batches([("plain", WEIGHTS["plain"])], torch.device("cuda:0"))
    assert not unpack_message(batch.to_message("a run"))[1]
    host.broadcast(batch.flat)
    taken.result(60)
    assert torch.equal(found.cpu(), batch.flat.cpu())
