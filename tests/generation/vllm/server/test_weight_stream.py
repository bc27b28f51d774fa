"""Weights between members of a group, in one process and over gloo."""

import threading
import time

import pytest
import torch

from trl.generation.vllm.server.weight_stream import (
    Deadline,
    Meeting,
    TransferError,
    WeightGroup,
    local_address,
)

CPU = torch.device("cpu")
WEIGHTS = {
    "plain": torch.arange(12.0).view(3, 4),
    "turned": torch.arange(12.0).view(3, 4).T,
    "half": torch.randn(7).bfloat16(),
    "flag": torch.tensor(True),
    "empty": torch.zeros(0, 3),
    "numbers": torch.arange(5),
}


def nothing():
    pass


def in_thread(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def meeting(free_port):
    return Meeting("127.0.0.1", free_port, size=3, seconds=5.0, run="a", on_gpu=False)


def meet(meeting, work):
    """The sender's group; each receiver does `work(group, rank)`."""
    host = WeightGroup.host(meeting)
    receivers = [
        in_thread(lambda rank=rank: work(WeightGroup.join(meeting, rank, CPU), rank))
        for rank in range(1, meeting.size)
    ]
    host.wait_for_all(nothing)
    host.connect(CPU)
    return host, receivers


def test_all_receivers_get_all_weights(meeting):
    found = {}

    def take(group, rank):
        found[rank] = [(name, w.clone(), whole) for name, w, whole in group.receive()]
        group.tell("verdict/1", f"from {rank}")

    host, _ = meet(meeting, take)
    for name, weight in WEIGHTS.items():
        host.send(name, weight, nothing)
    host.end(nothing)
    assert host.told_by_all("verdict/1", nothing) == ["from 1", "from 2"]
    for rank in (1, 2):
        assert [name for name, _, _ in found[rank]] == list(WEIGHTS)
        for name, weight, is_whole in found[rank]:
            assert is_whole and weight.dtype == WEIGHTS[name].dtype
            assert torch.equal(weight, WEIGHTS[name])


def test_a_change_on_the_way_is_seen(meeting, monkeypatch):
    found = []
    host, _ = meet(meeting, lambda group, rank: found.append([w[2] for w in group.receive()]))
    own = WeightGroup._broadcast
    changed = torch.ones(12, dtype=torch.float32).view(torch.uint8)

    def send(self, flat, alive):
        own(self, changed if self is host and flat.numel() == 48 else flat, alive)

    monkeypatch.setattr(WeightGroup, "_broadcast", send)
    for name in ("plain", "half"):
        host.send(name, WEIGHTS[name], nothing)
    host.end(nothing)
    end = Deadline(5)
    while len(found) < 2 and not end.has_passed:
        time.sleep(0.01)
    assert found == [[False, True]] * 2


@pytest.mark.parametrize("is_changed", [False, True])
def test_threads_may_differ_and_a_wrong_tensor_is_still_seen(meeting, monkeypatch, is_changed):
    """Sums of floats depend on the number of threads, so nothing that is compared may be one."""
    stream = torch.Generator().manual_seed(0)
    before = torch.randn(12, 40_000, generator=stream)
    weights = before + 1e-6 * torch.randn(before.shape, generator=stream)
    threads, found = torch.get_num_threads(), []
    own = WeightGroup._broadcast

    def take(group, rank):
        torch.set_num_threads(1)
        found.append([is_whole for _, _, is_whole in group.receive()])

    def send(self, flat, alive):
        own(self, flat, alive)
        if is_changed and self is not host and flat.numel() == weights[0].nbytes:
            flat[12345] ^= 1

    host, receivers = meet(meeting, take)
    monkeypatch.setattr(WeightGroup, "_broadcast", send)
    try:
        torch.set_num_threads(2)
        for weight in weights:
            host.send("weight", weight, nothing)
        host.end(nothing)
        for receiver in receivers:
            receiver.join(5)
    finally:
        torch.set_num_threads(threads)
    assert found == [[not is_changed] * len(weights)] * 2


def test_a_worker_that_does_not_come(meeting):
    short = Meeting("127.0.0.1", meeting.port, size=3, seconds=0.2, run="a", on_gpu=False)
    words = r"2 of 2 workers .* did not reach 127.0.0.1:[0-9]+ within 0.2 s.*vllm_group_port"
    with pytest.raises(TransferError, match=words):
        WeightGroup.host(short).wait_for_all(nothing)


def test_waiting_ends_when_nobody_is_there_any_more(meeting):
    def gone():
        raise KeyError("gone")

    with pytest.raises(KeyError):
        WeightGroup.host(meeting).wait_for_all(gone)


def test_a_receiver_that_takes_nothing_ends_the_wait(meeting):
    short = Meeting("127.0.0.1", meeting.port, size=3, seconds=0.5, run="a", on_gpu=False)
    held = []
    host, _ = meet(short, lambda group, rank: held.append(group))
    started = time.monotonic()
    with pytest.raises(TransferError, match="nothing moved for 0.5 s"):
        host.send("large", torch.zeros(2**24), nothing)
    assert time.monotonic() - started < 4
    with pytest.raises(TransferError, match="2 workers gave no answer within 0.5 s"):
        host.told_by_all("verdict/1", nothing)


def send_for_long(host):
    for _ in range(50):
        host.send("plain", WEIGHTS["plain"], nothing)
        time.sleep(0.01)


def test_a_receiver_that_leaves_is_an_error_of_no_rank_of_training(meeting):
    from trl.distributed import _is_lost

    host, threads = meet(meeting, lambda group, rank: group.close())
    for thread in threads:
        thread.join(5)
    with pytest.raises(TransferError) as caught:
        send_for_long(host)
    assert not _is_lost(caught.value)


def test_a_port_that_is_taken(meeting):
    first = WeightGroup.host(meeting)
    with pytest.raises(TransferError, match=f"Port {meeting.port}.*choose another vllm_group_port"):
        WeightGroup.host(meeting)
    first.close()


def test_names_are_bounded(meeting):
    host, _ = meet(meeting, lambda group, rank: None)
    with pytest.raises(TransferError, match="name of a weight is too long"):
        host.send("n" * 2000, WEIGHTS["plain"], nothing)


def test_deadlines():
    deadline = Deadline(30.0)
    assert not deadline.has_passed and deadline.left == pytest.approx(30.0, abs=1.0)
    assert Deadline(0.0).has_passed and Deadline(-1.0).left == 0.0


def test_the_address_by_which_this_machine_reaches_itself():
    assert local_address("127.0.0.1", 80) == "127.0.0.1"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL between them")
def test_weights_go_from_gpu_to_gpu(free_port):
    meeting = Meeting("127.0.0.1", free_port, size=2, seconds=60.0, run="a", on_gpu=True)
    host, found = WeightGroup.host(meeting), []

    def take():
        group = WeightGroup.join(meeting, 1, torch.device("cuda:1"))
        found.extend(group.receive())
        group.tell("verdict/1", "")

    in_thread(take)
    host.wait_for_all(nothing)
    host.connect(torch.device("cuda:0"))
    host.send("plain", WEIGHTS["plain"].to("cuda:0"), nothing)
    host.end(nothing)
    host.told_by_all("verdict/1", nothing)
    ((_, weight, is_whole),) = found
    assert is_whole and torch.equal(weight.cpu(), WEIGHTS["plain"])
