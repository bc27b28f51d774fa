"""Weights between members of a group, in one process and over gloo."""

import dataclasses
import threading
import time

import pytest
import torch

from trl.generation.vllm.server.meeting import Deadline, Door, Meeting, Peer, TransferError, join
from trl.generation.vllm.server.weight_stream import WeightGroup

CPU = torch.device("cpu")
WEIGHTS = {
    "plain": torch.arange(12.0).view(3, 4),
    "turned": torch.arange(12.0).view(3, 4).T,
    "half": torch.randn(7).bfloat16(),
    "flag": torch.tensor(True),
    "empty": torch.zeros(0, 3),
    "numbers": torch.arange(5),
}


def in_thread(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def meeting(free_port):
    return Meeting("127.0.0.1", free_port, size=3, seconds=5.0, run="a", on_gpu=False)


def meet(meeting, work, devices=(CPU,) * 3):
    """The sender's group; each receiver does `work(group, rank)`."""

    def come(rank):
        group = WeightGroup(meeting, rank, [join(meeting, rank)], devices[rank])
        work(group, rank)

    door = Door(meeting, [meeting.address])
    receivers = [in_thread(lambda rank=rank: come(rank)) for rank in range(1, meeting.size)]
    host = WeightGroup(meeting, 0, door.wait_for_all(), devices[0])
    return host, receivers


def test_all_receivers_get_all_weights(meeting):
    found = {}

    def take(group, rank):
        found[rank] = [(name, w.clone(), whole) for name, w, whole in group.receive()]
        group.answer(f"from {rank}")

    host, _ = meet(meeting, take)
    for name, weight in WEIGHTS.items():
        host.send(name, weight)
    host.end()
    assert host.answers() == ["from 1", "from 2"]
    for rank in (1, 2):
        assert [name for name, _, _ in found[rank]] == list(WEIGHTS)
        for name, weight, is_whole in found[rank]:
            assert is_whole and weight.dtype == WEIGHTS[name].dtype
            assert torch.equal(weight, WEIGHTS[name])


def test_a_change_on_the_way_is_seen(meeting, monkeypatch):
    found = []
    host, receivers = meet(
        meeting, lambda group, rank: found.append([w[2] for w in group.receive()])
    )
    own = Peer.send

    def send(self, data):
        changed = bytearray(data)
        if len(data) == WEIGHTS["plain"].nbytes:
            changed[7] ^= 1
        own(self, changed)

    monkeypatch.setattr(Peer, "send", send)
    for name in ("plain", "half"):
        host.send(name, WEIGHTS[name])
    host.end()
    for receiver in receivers:
        receiver.join(60)
    assert found == [[False, True]] * 2


@pytest.mark.parametrize("is_changed", [False, True])
def test_threads_may_differ_and_a_wrong_tensor_is_still_seen(meeting, monkeypatch, is_changed):
    """Sums of floats depend on the number of threads, so nothing that is compared may be one."""
    stream = torch.Generator().manual_seed(0)
    before = torch.randn(12, 40_000, generator=stream)
    weights = before + 1e-6 * torch.randn(before.shape, generator=stream)
    threads, found = torch.get_num_threads(), []
    own = Peer.receive

    def take(group, rank):
        torch.set_num_threads(1)
        found.append([is_whole for _, _, is_whole in group.receive()])

    def receive(self, room):
        own(self, room)
        if is_changed and len(room) == weights[0].nbytes:
            room[12345] ^= 1

    monkeypatch.setattr(Peer, "receive", receive)
    host, receivers = meet(meeting, take)
    try:
        torch.set_num_threads(2)
        for weight in weights:
            host.send("weight", weight)
        host.end()
        for receiver in receivers:
            receiver.join(60)
    finally:
        torch.set_num_threads(threads)
    assert found == [[not is_changed] * len(weights)] * 2


def test_a_receiver_that_takes_nothing_ends_the_wait(meeting):
    short = Meeting("127.0.0.1", meeting.port, size=3, seconds=0.5, run="a", on_gpu=False)
    held = []
    host, _ = meet(short, lambda group, rank: held.append(group))
    with pytest.raises(TransferError, match="nothing moved for 0.5 s"):
        host.send("large", torch.zeros(2**24))
    with pytest.raises(TransferError, match="nothing moved for 0.5 s"):
        host.answers()


def test_a_receiver_that_leaves_is_seen_at_the_next_weight_and_is_no_rank_of_training(meeting):
    from trl.distributed import _is_lost

    host, threads = meet(meeting, lambda group, rank: group.close())
    for thread in threads:
        thread.join(60)
    with pytest.raises(TransferError, match="the other side has left") as caught:
        host.send("plain", WEIGHTS["plain"])
    assert not _is_lost(caught.value)


class StandIn:
    """What torch's NCCL group does with its store, on CPUs: members who know its identity meet."""

    class Options:
        pass

    boards = {}  # what was broadcast, by identity and number

    def __init__(self, store, rank, size, options):
        self.store, self.rank, self.count = store, rank, 0
        assert options._timeout.total_seconds() == 10

    def broadcast(self, tensors, options):
        assert options.rootRank == 0
        if self.rank == 0 and not self.count:
            self.store.set("0", bytes(range(128, 256)))
        key, self.count = (self.store.get("0"), self.count), self.count + 1
        if self.rank == 0:
            self.boards[key] = tensors[0].clone()
        end = Deadline(5)
        while key not in self.boards and not end.has_passed:
            time.sleep(0.001)
        tensors[0].copy_(self.boards[key])
        return self

    def is_completed(self):
        return True

    def wait(self):
        return True

    def abort(self):
        pass


def test_the_identity_of_a_group_over_nccl_goes_over_proven_connections(meeting, monkeypatch):
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", StandIn, raising=False)
    on_gpu, found = dataclasses.replace(meeting, on_gpu=True), []
    host, receivers = meet(on_gpu, lambda group, rank: found.append(list(group.receive())))
    for name, weight in WEIGHTS.items():
        host.send(name, weight)
    host.end()
    for receiver in receivers:
        receiver.join(60)
    assert len(found) == 2 and len({key for key, _ in StandIn.boards}) == 1
    for rows in found:
        for name, weight, is_whole in rows:
            assert is_whole and torch.equal(weight, WEIGHTS[name])
    host.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL between them")
def test_weights_go_from_gpu_to_gpu(free_port):
    meeting = Meeting("127.0.0.1", free_port, size=2, seconds=60.0, run="a", on_gpu=True)
    found = []

    def take(group, rank):
        found.extend(group.receive())
        group.answer("")

    host, _ = meet(meeting, take, [torch.device("cuda:0"), torch.device("cuda:1")])
    host.send("plain", WEIGHTS["plain"].to("cuda:0"))
    host.end()
    host.answers()
    ((_, weight, is_whole),) = found
    assert is_whole and torch.equal(weight.cpu(), WEIGHTS["plain"])
