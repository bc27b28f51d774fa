"""Weights on their way from a trainer to the workers of vLLM servers.

The trainer is rank 0 of a group of its own, which has nothing to do with that of training; the
others are workers. A weight is a header and its bytes, so a receiver knows nothing beforehand.
Imports torch and the standard library: it runs in the workers too.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from ..weight_proof import fingerprint

HEADER = 1024  # bytes
SHORTEST, LONGEST = 5e-5, 5e-3  # seconds between two looks at a transfer
_PATIENCE = 2  # times its deadline, after which a group itself gives up


class TransferError(ConnectionError):
    """A weight did not get through.

    No `RuntimeError` and without a cause, so that it is not taken for a rank of training that is
    lost.
    """


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


@dataclass(frozen=True)
class Meeting:
    """Where and how a trainer and workers meet.

    Args:
        address (`str`): of the trainer, as the workers reach it.
        port (`int`): on which it listens.
        size (`int`): of the group: the trainer and all workers.
        seconds (`float`): in which anything there must happen.
        run (`str`): tells this group from others.
        on_gpu (`bool`): whether weights go from GPU to GPU, by NCCL; by gloo otherwise.
    """

    address: str
    port: int
    size: int
    seconds: float
    run: str
    on_gpu: bool


class WeightGroup:
    """The group, as one of its members sees it.

    Args:
        meeting (`Meeting`): where it meets.
        rank (`int`): 0 for the trainer.
        store: what `host` or `join` has made.
    """

    def __init__(self, meeting: Meeting, rank: int, store: Any):
        self.meeting = meeting
        self._rank = rank
        self._store = store
        self._group: Any = None
        self.device = torch.device("cpu")

    @classmethod
    def host(cls, meeting: Meeting) -> WeightGroup:
        """Let workers come.

        Raises:
            TransferError: if the port is taken.
        """
        try:
            store = _store(meeting, 0)
        except distributed.DistError as error:
            words = str(error).splitlines()[0]
        else:
            return cls(meeting, 0, store)
        raise TransferError(
            f"Port {meeting.port}, over which weights are to be sent, cannot be used ({words}): "
            "choose another vllm_group_port."
        )

    @classmethod
    def join(cls, meeting: Meeting, rank: int, device: torch.device) -> WeightGroup:
        """Meet the trainer, as a worker; returns once all have come."""
        found = cls(meeting, rank, _store(meeting, rank))
        found.tell("joined", "")
        found.connect(device)
        return found

    def wait_for_all(self, alive: Callable[[], None]) -> None:
        """Wait until all workers have come, so that `connect` need not wait.

        Args:
            alive: raises if one of them cannot come.

        Raises:
            TransferError: if one does not come in time.
        """
        missing = self._wait_for([f"joined/{n}" for n in range(1, self.meeting.size)], alive)
        if missing:
            raise TransferError(
                f"{len(missing)} of {self.meeting.size - 1} workers of the vLLM servers did not "
                f"reach {self.meeting.address}:{self.meeting.port} within "
                f"{self.meeting.seconds:g} s. Can they connect to that address and port "
                "(vllm_group_port)?"
            )

    def connect(self, device: torch.device) -> None:
        """Make the group; all members call it.

        Args:
            device (`torch.device`): of this member's weights.
        """
        self.device = device if self.meeting.on_gpu else torch.device("cpu")
        store = distributed.PrefixStore("weights", self._store)
        timeout = timedelta(seconds=_PATIENCE * self.meeting.seconds)
        make = _nccl_group if self.meeting.on_gpu else _gloo_group
        self._group = make(store, self._rank, self.meeting, timeout)

    def close(self) -> None:
        """Leave, without waiting for anyone."""
        if self._group is not None and self.meeting.on_gpu:
            self._group.abort()
        self._group = self._store = None

    # --- Words ---

    def tell(self, key: str, value: str) -> None:
        """Leave a word under a key and this rank."""
        self._store.set(f"{key}/{self._rank}", value)

    def told_by_all(self, key: str, alive: Callable[[], None]) -> list[str]:
        """What each worker has left, once all have.

        Args:
            key (`str`): under which.
            alive: raises if one of them cannot.

        Raises:
            TransferError: if one leaves nothing in time.
        """
        keys = [f"{key}/{rank}" for rank in range(1, self.meeting.size)]
        if missing := self._wait_for(keys, alive):
            seconds = self.meeting.seconds
            raise TransferError(f"{len(missing)} workers gave no answer within {seconds:g} s")
        return [str(self._store.get(key).decode()) for key in keys]

    def _wait_for(self, keys: list[str], alive: Callable[[], None]) -> list[str]:
        """Wait until words are there; those that did not come in time."""
        deadline, pause = Deadline(self.meeting.seconds), SHORTEST
        while missing := [key for key in keys if not self._store.check([key])]:
            alive()
            if deadline.has_passed:
                break
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)
        return missing

    # --- Weights ---

    def send(self, name: str, weight: Tensor, alive: Callable[[], None]) -> None:
        """Send one weight.

        Args:
            name (`str`): of the weight in a checkpoint.
            weight (`Tensor`): of any shape.
            alive: raises if nobody receives any more.

        Raises:
            TransferError: if it does not get through in time.
        """
        flat = weight.detach().to(self.device).contiguous()
        about = {
            "name": name,
            "dtype": str(weight.dtype).removeprefix("torch."),
            "shape": list(weight.shape),
            "fingerprint": fingerprint(flat).item(),
        }
        self._send_header(about, alive)
        self._broadcast(_as_bytes(flat), alive)

    def end(self, alive: Callable[[], None]) -> None:
        """Tell the receivers that this was all."""
        self._send_header({"name": None}, alive)

    def receive(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield name, weight and whether it is what was sent, until the sender says it was all.

        Raises:
            TransferError: if the next one does not come in time.
        """
        while True:
            header = torch.zeros(HEADER, dtype=torch.uint8, device=self.device)
            self._broadcast(header, _nothing)
            about = json.loads(bytes(header.tolist()).rstrip(b"\0"))
            if about["name"] is None:
                return
            dtype = getattr(torch, about["dtype"])
            weight = torch.empty(about["shape"], dtype=dtype, device=self.device)
            self._broadcast(_as_bytes(weight), _nothing)
            yield about["name"], weight, fingerprint(weight).item() == about["fingerprint"]

    def _send_header(self, about: dict[str, Any], alive: Callable[[], None]) -> None:
        words = json.dumps(about).encode()
        if len(words) > HEADER:
            raise TransferError(f"The name of a weight is too long: {about['name']}")
        header = torch.frombuffer(bytearray(words.ljust(HEADER, b"\0")), dtype=torch.uint8)
        self._broadcast(header.to(self.device), alive)

    def _broadcast(self, flat: Tensor, alive: Callable[[], None]) -> None:
        """Hand bytes from rank 0 to all."""
        if not flat.numel():
            return
        deadline, pause = Deadline(self.meeting.seconds), SHORTEST
        options = distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        words = None
        try:
            work = self._group.broadcast([flat], options)
            while not work.is_completed():
                alive()
                if deadline.has_passed:
                    words = f"nothing moved for {deadline.seconds:g} s"
                    break
                time.sleep(pause)
                pause = min(2 * pause, LONGEST)
            else:
                work.wait()
        except RuntimeError as error:  # of the group itself
            words = str(error).splitlines()[0]
        if words is not None:
            raise TransferError(words)


def _nothing() -> None:
    """Receivers have only their deadline."""


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _store(meeting: Meeting, rank: int) -> Any:
    return distributed.TCPStore(
        meeting.address if rank else "0.0.0.0",
        meeting.port,
        meeting.size,
        is_master=rank == 0,
        timeout=timedelta(seconds=meeting.seconds),
        wait_for_workers=False,
    )


def _gloo_group(store: Any, rank: int, meeting: Meeting, timeout: timedelta) -> Any:
    options = distributed.ProcessGroupGloo._Options()
    own = local_address(meeting.address, meeting.port) if rank else meeting.address
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=own)]
    options._timeout = timeout
    return distributed.ProcessGroupGloo(store, rank, meeting.size, options)


def _nccl_group(store: Any, rank: int, meeting: Meeting, timeout: timedelta) -> Any:
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, rank, meeting.size, options)


def local_address(host: str, port: int) -> str:
    """The address of this machine from which another one is reached; sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
