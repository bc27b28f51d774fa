"""Who gets in where a trainer waits for workers, and who cannot keep them out."""

import secrets
import socket

import pytest

from trl.generation.vllm.server import meeting as meetings
from trl.generation.vllm.server.meeting import (
    MOST_UNPROVEN,
    Deadline,
    Door,
    Meeting,
    Peer,
    TransferError,
    in_background,
    join,
    local_address,
)
from trl.generation.vllm.server.secret import proof

SECRET = "of trainer and workers"


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("TRL_VLLM_TOKEN", SECRET)
    monkeypatch.setattr(meetings, "GREETING_SECONDS", 2.0)


@pytest.fixture
def meeting(free_port):
    return Meeting("127.0.0.1", free_port, size=3, seconds=20.0, run="a", on_gpu=False)


@pytest.fixture
def door(meeting):
    found = Door(meeting, ["127.0.0.1"])
    yield found
    found.close()


def short(meeting, seconds=0.3, **changes):
    return Meeting(**(vars(meeting) | {"seconds": seconds} | changes))


def stranger(meeting):
    return socket.create_connection((meeting.address, meeting.port), 5.0)


def check_that_workers_meet(meeting, door):
    """Each in its own place, whoever comes first."""
    workers = [in_background(lambda rank=rank: join(meeting, rank)) for rank in (2, 1)]
    peers = door.wait_for_all()
    for rank, peer, worker in zip((1, 2), peers, reversed(workers), strict=True):
        peer.tell({"to": rank})
        assert worker.result(60).hear() == {"to": rank}


def refused(connection):
    """Whether the other side closes; it must, soon."""
    connection.settimeout(60.0)
    try:
        while connection.recv(1000):
            pass
    except ConnectionError:
        pass
    return True


def test_workers_meet(meeting, door):
    check_that_workers_meet(meeting, door)
    with pytest.raises(OSError):
        stranger(meeting)


def test_it_listens_on_the_address_that_is_used_alone(meeting, door):
    assert local_address("127.0.0.1", 80) == "127.0.0.1"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", meeting.port), 5.0)


def test_strangers_who_say_nothing_keep_nobody_out(meeting, door):
    """Far more of them than are listened to at a time, who never leave by themselves."""
    strangers = [stranger(meeting) for _ in range(2 * MOST_UNPROVEN)]
    check_that_workers_meet(meeting, door)
    assert all(refused(found) for found in strangers)


@pytest.mark.parametrize(
    "words",
    [b"GET / HTTP/1.1\r\n\r\n", b"", secrets.token_bytes(10_000), bytes(10_000)],
    ids=["http", "nothing", "noise", "zeros"],
)
def test_strangers_who_say_something_else_are_sent_away(meeting, door, words):
    connection = stranger(meeting)
    connection.sendall(words)
    assert refused(connection)
    check_that_workers_meet(meeting, door)


@pytest.mark.parametrize("wrong", ["", "another"])
def test_another_secret_does_not_open(meeting, door, monkeypatch, wrong):
    monkeypatch.setenv("TRL_VLLM_TOKEN", wrong)
    with pytest.raises(TransferError, match="did not let this worker in: the other side has left"):
        join(short(meeting), 1)
    monkeypatch.setenv("TRL_VLLM_TOKEN", SECRET)
    check_that_workers_meet(meeting, door)


def test_another_run_and_places_that_there_are_none_of_do_not_open(meeting, door):
    for wrong, rank in ((short(meeting, run="b"), 1), (short(meeting), 0), (short(meeting), 3)):
        with pytest.raises(TransferError, match="did not let this worker in"):
            join(wrong, rank)
    check_that_workers_meet(meeting, door)


def test_a_greeting_that_was_recorded_does_not_open(meeting, door, monkeypatch):
    sent, own = [], Peer.send
    monkeypatch.setattr(
        Peer, "send", lambda self, data: sent.append(bytes(data)) or own(self, data)
    )
    worker = join(meeting, 1)
    (greeting,) = [data for data in sent if len(data) == 16 + 4 + 64]
    connection = stranger(meeting)
    connection.sendall(greeting)
    assert refused(connection)
    assert list(door._here) == [1]
    other = in_background(lambda: join(meeting, 2))
    first, _ = door.wait_for_all()
    first.tell("to the worker, not to the stranger")
    assert worker.hear() == "to the worker, not to the stranger" and other.result(60)


def test_a_stranger_who_is_there_first_is_not_taken_for_the_trainer(meeting):
    """It knows all that goes over the network in the clear, but for the secret."""
    own = socket.create_server((meeting.address, meeting.port))

    def pretend():
        while True:
            connection, _ = own.accept()
            connection.sendall(bytes(16))
            claim = connection.recv(1000)
            words = [meeting.run.encode(), bytes(16), claim[:16], claim[16:20]]
            connection.sendall(proof(b"guessed", b"trainer", *words).encode())

    in_background(pretend)
    with pytest.raises(TransferError, match="whoever listens there does not know the secret"):
        join(short(meeting), 1)
    own.close()


def test_workers_that_do_not_come(meeting):
    words = r"2 of 2 workers .* did not reach 127.0.0.1:[0-9]+ within 0.2 s.*vllm_group_port"
    door = Door(short(meeting, 0.2), ["127.0.0.1"])
    with pytest.raises(TransferError, match=words):
        door.wait_for_all()


def test_waiting_ends_when_nobody_is_there_any_more(door):
    def gone():
        raise KeyError("gone")

    with pytest.raises(KeyError):
        door.wait_for_all(gone)


def test_a_port_that_is_taken(meeting, door):
    with pytest.raises(TransferError, match=f"Port {meeting.port}.*choose another vllm_group_port"):
        Door(meeting, ["127.0.0.1"])


def test_messages_have_deadlines_and_ends(meeting, door):
    worker = in_background(lambda: join(meeting, 1))
    in_background(lambda: join(meeting, 2))
    peer, _ = door.wait_for_all()
    peer.seconds = 0.2
    with pytest.raises(TransferError, match="nothing moved for 0.2 s"):
        peer.hear()
    worker.result(60).send((2**31).to_bytes(4, "big"))
    with pytest.raises(TransferError, match="a message of 2147483648 bytes was announced"):
        peer.hear()
    worker.result(60).close()
    with pytest.raises(TransferError, match="the other side has left"):
        peer.hear()


# --- Waiting ---


def test_deadlines():
    deadline = Deadline(30.0)
    assert not deadline.has_passed and deadline.left == pytest.approx(30.0, abs=10.0)
    assert Deadline(0.0).has_passed and Deadline(-1.0).left == 0.0


def test_errors_of_the_background_are_kept():
    assert in_background(lambda: 3).result(60) == 3
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0).result(60)
