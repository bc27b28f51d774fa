"""Where a trainer meets the workers of its vLLM servers: who knows the secret gets in.

Imports the standard library alone: it runs in the workers too.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from .secret import is_proven, proof, shared_secret

GREETING_SECONDS = 5.0  # in which who connects must prove to know the secret
MOST_UNPROVEN = 64  # connections that may be proving it; the oldest give way to new ones
LONGEST_WORDS = 2**20  # bytes
LOOK_SECONDS = 0.01  # between two looks at who has come
NONCE, PROOF = 16, 64  # bytes

Answer = TypeVar("Answer")


class Deadline:
    """A point in time.

    Args:
        seconds (`float`): from now.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until then; 0 once it has passed."""
        return max(0.0, self._end - time.monotonic())

    @property
    def has_passed(self) -> bool:
        """Whether it is over."""
        return not self.left


def in_background(work: Callable[[], Answer]) -> Future[Answer]:
    """Do something in a thread that the end of the process does not wait for."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class TransferError(ConnectionError):
    """A weight did not get through.

    Not a `RuntimeError` and never caused by one of NCCL, so that it is not taken for a rank of
    training that is lost.
    """


@dataclass(frozen=True)
class Meeting:
    """Where and how a trainer and workers meet."""

    address: str  # of the trainer, as the workers reach it
    port: int  # on which it listens
    size: int  # of the group: the trainer and all workers
    seconds: float  # in which anything there must happen
    run: str  # tells this group from others
    on_gpu: bool  # whether weights go from GPU to GPU, by NCCL; by TCP otherwise


class Peer:
    """A connection between a trainer and a worker.

    Args:
        connection (`socket`): over TCP.
        seconds (`float`): in which each message must have gone or come.
    """

    def __init__(self, connection: socket.socket, seconds: float):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self.seconds = seconds

    def send(self, data: bytes | memoryview) -> None:
        """Send bytes.

        Raises:
            TransferError: if they do not get through in time.
        """
        self._connection.settimeout(self.seconds)
        with _transfer_errors(self.seconds):
            self._connection.sendall(data)

    def receive(self, room: memoryview) -> None:
        """Fill all of `room`; see `send`."""
        deadline, filled = Deadline(self.seconds), 0
        with _transfer_errors(self.seconds):
            while filled < len(room):
                self._connection.settimeout(max(1e-3, deadline.left))
                count = self._connection.recv_into(room[filled:])
                if not count:
                    raise ConnectionError("the other side has left")
                filled += count

    def check(self) -> None:
        """Raise `TransferError` if the other side, which has nothing to say now, has left."""
        self._connection.setblocking(False)
        with _transfer_errors(self.seconds), suppress(BlockingIOError):
            if not self._connection.recv(1, socket.MSG_PEEK):
                raise ConnectionError("the other side has left")

    def tell(self, words: Any) -> None:
        """Send what JSON can hold."""
        text = json.dumps(words).encode()
        self.send(len(text).to_bytes(4, "big") + text)

    def hear(self) -> Any:
        """Take what the other side tells."""
        size = int.from_bytes(self.take(4), "big")
        if size > LONGEST_WORDS:
            raise TransferError(f"a message of {size} bytes was announced")
        return json.loads(self.take(size))

    def take(self, count: int) -> bytes:
        """Receive so many bytes."""
        room = bytearray(count)
        self.receive(memoryview(room))
        return bytes(room)

    def close(self) -> None:
        """Leave, without waiting for the other side."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


@contextmanager
def _transfer_errors(seconds: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise TransferError(f"nothing moved for {seconds:g} s") from error
    except OSError as error:
        raise TransferError(str(error)) from error


class Door:
    """Where a trainer listens for workers; it lets in who proves to know the secret.

    Args:
        meeting (`Meeting`): its port, and who is to come.
        addresses: of this machine, by which the workers reach it.

    Raises:
        TransferError: if the port is taken.
    """

    def __init__(self, meeting: Meeting, addresses: Iterable[str]):
        self._meeting = meeting
        self._secret = shared_secret()
        self._here: dict[int, Peer] = {}
        self._unproven: deque[socket.socket] = deque()
        self._listeners: list[socket.socket] = []
        try:
            for address in dict.fromkeys(addresses):
                self._listeners.append(_listen(address, meeting.port))
        except OSError as error:
            self.close()
            raise TransferError(
                f"Port {meeting.port}, over which weights are to be sent, cannot be used "
                f"({error}): choose another vllm_group_port."
            ) from error
        for listener in self._listeners:
            in_background(lambda listener=listener: self._answer(listener))

    def wait_for_all(self, alive: Callable[[], None] = lambda: None) -> list[Peer]:
        """Wait until all workers have come, and close.

        Args:
            alive: raises if one of them cannot come.

        Raises:
            TransferError: if one does not come in time.
        """
        meeting, deadline = self._meeting, Deadline(self._meeting.seconds)
        try:
            while missing := meeting.size - 1 - len(self._here):
                alive()
                if deadline.has_passed:
                    raise TransferError(
                        f"{missing} of {meeting.size - 1} workers of the vLLM servers did not "
                        f"reach {meeting.address}:{meeting.port} within {meeting.seconds:g} s. Can "
                        "they connect to that address and port (vllm_group_port)?"
                    )
                time.sleep(LOOK_SECONDS)
        finally:
            self.close()
        return [self._here[rank] for rank in range(1, meeting.size)]

    def close(self) -> None:
        """Let nobody in any more."""
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # which also ends the wait for somebody
            listener.close()
        self._listeners = []

    def _answer(self, listener: socket.socket) -> None:
        while self._listeners:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed, or whoever came has left
                time.sleep(LOOK_SECONDS)
                continue
            # Strangers who say nothing must not keep workers out.
            self._unproven.append(connection)
            if len(self._unproven) > MOST_UNPROVEN:
                Peer(self._unproven.popleft(), 0.0).close()
            in_background(lambda connection=connection: self._greet(connection))

    def _greet(self, connection: socket.socket) -> None:
        """Let in who proves to know secret and run, and prove the same."""
        try:
            peer, nonce = Peer(connection, GREETING_SECONDS), secrets.token_bytes(NONCE)
            peer.send(nonce)
            words = [self._meeting.run.encode(), nonce, peer.take(NONCE), peer.take(4)]
            rank = int.from_bytes(words[-1], "big")
            is_expected = 0 < rank < self._meeting.size
            if not is_proven(peer.take(PROOF), self._secret, b"worker", *words) or not is_expected:
                raise TransferError("a stranger")
            peer.send(proof(self._secret, b"trainer", *words).encode())
            peer.seconds = self._meeting.seconds
            self._here[rank] = peer
        except OSError:
            connection.close()
        finally:
            with suppress(ValueError):  # it may have given way
                self._unproven.remove(connection)


def join(meeting: Meeting, rank: int) -> Peer:
    """Meet the trainer, as a worker.

    Args:
        meeting (`Meeting`): where.
        rank (`int`): of this worker, from 1.

    Raises:
        TransferError: if nobody is there in time who knows the secret.
    """
    deadline, secret = Deadline(meeting.seconds), shared_secret()
    while True:
        try:
            return _prove(meeting, rank, secret)
        except OSError as error:
            if deadline.has_passed:
                raise TransferError(
                    f"{meeting.address}:{meeting.port} did not let this worker in: {error}"
                ) from error
        time.sleep(LOOK_SECONDS)


def _prove(meeting: Meeting, rank: int, secret: bytes) -> Peer:
    address = (meeting.address, meeting.port)
    peer = Peer(socket.create_connection(address, meeting.seconds), GREETING_SECONDS)
    try:
        nonce, place = secrets.token_bytes(NONCE), rank.to_bytes(4, "big")
        words = [meeting.run.encode(), peer.take(NONCE), nonce, place]
        peer.send(nonce + place + proof(secret, b"worker", *words).encode())
        if not is_proven(peer.take(PROOF), secret, b"trainer", *words):
            raise TransferError("whoever listens there does not know the secret")
    except OSError:
        peer.close()
        raise
    peer.seconds = meeting.seconds
    return peer


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=MOST_UNPROVEN)


def local_address(host: str, port: int) -> str:
    """The address of this machine from which another one is reached; sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
