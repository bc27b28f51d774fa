"""Weights on their way from a trainer to the workers of vLLM servers.

They travel in batches: names, types and shapes over a route on which both sides prove the secret,
and with them the bytes. Between GPUs the bytes go by NCCL, in a group of its own that has nothing
to do with that of training. Imports torch and the standard library: it runs in the workers too.
"""

import base64
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from ..weight_verifier import fingerprint
from .client import looks, run_in_background

BATCH_BYTES = 2**26  # of weights that travel together; larger ones travel alone
SHORTEST_LOOK, LONGEST_LOOK = 5e-5, 5e-3  # seconds between two looks at a transfer
NCCL_SLACK = 2  # times its deadline, after which NCCL itself gives up
NCCL_ID = "0"  # under which torch leaves the identity of its first communicator
Check = Callable[[], None]


class TransferError(ConnectionError):
    """A weight did not get through. Not caused by an error that looks like a rank that is lost."""


@dataclass(frozen=True)
class Batch:
    """Weights that travel together."""

    headers: Sequence[Sequence[Any]]  # name, type and shape of each
    flat: Tensor  # their bytes, one after the other

    @property
    def name(self) -> str:
        """What messages call it: its first weight."""
        return self.headers[0][0]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of each."""
        start = 0
        for name, kind, shape in self.headers:
            dtype = getattr(torch, kind)
            stop = start + math.prod(shape) * dtype.itemsize
            # The copy begins where one of its type may begin.
            yield name, self.flat[start:stop].clone().view(dtype).view(shape)
            start = stop

    def packed(self, run: str) -> bytes:
        """As a message of a run; bytes on a GPU are no part of it."""
        head = {"run": run, "headers": self.headers, "size": len(self.flat)}
        head["fingerprint"] = fingerprint(self.flat).item()
        text = json.dumps(head).encode()
        body = b"" if self.flat.is_cuda else memoryview(self.flat.numpy())
        return b"".join((len(text).to_bytes(4, "big"), text, body))


def unpack_message(message: bytes) -> tuple[dict[str, Any], memoryview]:
    """What a message of `Batch.packed` says, and the bytes in it."""
    stop = 4 + int.from_bytes(message[:4], "big")
    return json.loads(message[4:stop]), memoryview(message)[stop:]


def batches(weights: Iterable[tuple[str, Tensor]], device: torch.device) -> Iterator[Batch]:
    """Put weights together, on a device; each batch is valid until the next one is asked for."""
    headers: list[tuple[str, str, list[int]]] = []
    parts: list[Tensor] = []
    for name, weight in weights:
        flat = weight.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
        header = (name, str(weight.dtype).removeprefix("torch."), list(weight.shape))
        if headers and sum(map(len, parts)) + len(flat) > BATCH_BYTES:
            yield Batch(headers, torch.cat(parts))
            headers, parts = [], []
        if len(flat) > BATCH_BYTES:
            yield Batch([header], flat)
        else:
            headers.append(header)
            parts.append(flat.clone())  # the next weight may take its memory
    if headers:
        yield Batch(headers, torch.cat(parts))


class WeightGroup:
    """A trainer, which has rank 0, and workers whose GPUs hand weights to each other by NCCL.

    A `TransferError` ends a step of a transfer, or the start of NCCL, that takes over `seconds`.
    Members find each other by an identity, which the trainer's group makes.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, seconds: float, identity: str | None
    ):
        self.seconds = seconds
        self._device = device
        # A store of this process alone holds the identity: it travels where both sides have proven
        # the secret.
        store = distributed.HashStore()
        self._nccl: Any = distributed.ProcessGroupNCCL(
            store, rank, size, timeout=timedelta(seconds=NCCL_SLACK * seconds)
        )
        if identity is not None:
            store.set(NCCL_ID, base64.b64decode(identity))
        first = torch.zeros(1, dtype=torch.uint8, device=device)
        self._begun = run_in_background(lambda: self._start(first))  # returns once all have come
        self._wait(lambda: store.check([NCCL_ID]) or self._begun.done())
        if not store.check([NCCL_ID]):
            self.wait_for_all()  # which says why it failed
        self.identity = base64.b64encode(store.get(NCCL_ID)).decode()

    def wait_for_all(self, check: Check = lambda: None) -> None:
        """Wait until all members have come; see `broadcast`."""

        def begun() -> Any:
            self._wait(self._begun.done, check)
            return self._begun.result()

        self._finish(begun, check)

    def broadcast(self, flat: Tensor, check: Check = lambda: None) -> None:
        """Hand bytes from the trainer's GPU to all; `check` raises if another member failed."""
        if len(flat):
            self._finish(lambda: self._start(flat), check)

    def close(self) -> None:
        """Leave, without waiting for anyone."""
        self._nccl.abort()

    def _start(self, flat: Tensor) -> Any:
        options = distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        return self._nccl.broadcast([flat], options)

    def _finish(self, start: Callable[[], Any], check: Check) -> None:
        words = None
        try:
            work = start()
            self._wait(work.is_completed, check)
            work.wait()
        except RuntimeError as error:  # of NCCL
            words = str(error).splitlines()[0]
        if words is not None:
            raise TransferError(words)

    def _wait(self, is_done: Callable[[], bool], check: Check = lambda: None) -> None:
        for _ in looks(self.seconds, SHORTEST_LOOK, LONGEST_LOOK):
            if is_done():
                return
            check()
        raise TransferError(f"nothing moved for {self.seconds:g} s")
