"""Transfer of weights from a trainer to the workers of vLLM servers, in batches.

Names, dtypes and shapes of a batch go over HTTP to a route that both sides authenticate, with the
bytes of the weights unless trainer and servers are on GPUs. Then the bytes are broadcast by NCCL,
in a process group of its own. Imports no library but torch: workers import it, too.
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
from .client import poll, run_in_background

BATCH_BYTES = 2**26  # of weights in one batch; a larger weight has a batch of its own
# Seconds between two checks of a transfer.
MIN_POLL_SECONDS = 5e-5
MAX_POLL_SECONDS = 5e-3
NCCL_TIMEOUT_FACTOR = 2  # NCCL's own timeout, as a multiple of the deadline of a transfer
NCCL_ID_KEY = "0"  # where torch stores the unique id of a process group's first communicator
DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
Check = Callable[[], None]  # raises if another member of a transfer failed


class TransferError(ConnectionError):
    """A transfer of weights failed.

    It has no cause, for an error of NCCL as the cause would look like a lost rank of training.
    """


@dataclass(frozen=True)
class WeightBatch:
    """Weights that are sent together."""

    headers: Sequence[Sequence[Any]]  # name, dtype and shape of each
    flat: Tensor  # (N,) uint8: their bytes, concatenated

    @property
    def first_name(self) -> str:
        """The name of the first weight, for messages."""
        return self.headers[0][0]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of each weight."""
        start = 0
        for name, dtype_name, shape in self.headers:
            dtype = DTYPES[dtype_name]
            stop = start + math.prod(shape) * dtype.itemsize
            # A slice may not be aligned for its dtype, but a copy is.
            yield name, self.flat[start:stop].clone().view(dtype).view(shape)
            start = stop

    def to_message(self, run_id: str) -> bytes:
        """Serialize the batch. Bytes on a GPU are left out, for NCCL sends them."""
        head = {
            "run": run_id,
            "headers": self.headers,
            "size": len(self.flat),
            "fingerprint": fingerprint(self.flat).item(),
        }
        text = json.dumps(head).encode()
        body = b"" if self.flat.is_cuda else memoryview(self.flat.numpy())
        return b"".join((len(text).to_bytes(4, "big"), text, body))


def unpack_message(message: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the head of a message of `WeightBatch.to_message`, and the bytes of its weights."""
    stop = 4 + int.from_bytes(message[:4], "big")
    return json.loads(message[4:stop]), memoryview(message)[stop:]


def weight_batches(
    weights: Iterable[tuple[str, Tensor]], device: torch.device
) -> Iterator[WeightBatch]:
    """Group weights into batches on a device. A batch is valid until the next one is yielded."""
    headers: list[tuple[str, str, list[int]]] = []
    byte_tensors: list[Tensor] = []
    for name, weight in weights:
        flat = weight.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
        header = (name, str(weight.dtype).removeprefix("torch."), list(weight.shape))
        if headers and sum(map(len, byte_tensors)) + len(flat) > BATCH_BYTES:
            yield WeightBatch(headers, torch.cat(byte_tensors))
            headers = []
            byte_tensors = []
        if len(flat) > BATCH_BYTES:
            yield WeightBatch([header], flat)
        else:
            headers.append(header)
            byte_tensors.append(flat.clone())  # the next weight may reuse this memory
    if headers:
        yield WeightBatch(headers, torch.cat(byte_tensors))


class WeightGroup:
    """An NCCL process group of a trainer's GPU, which has rank 0, and the GPUs of workers.

    Members find each other by an NCCL id, which the trainer's group makes (`nccl_id=None`) and
    workers get. A start or transfer that takes longer than `seconds` raises `TransferError`.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, seconds: float, nccl_id: str | None
    ):
        self.seconds = seconds
        self._device = device
        # The store is local: the id travels over the authenticated HTTP route instead.
        store = distributed.HashStore()
        self._nccl: Any = distributed.ProcessGroupNCCL(
            store, rank, size, timeout=timedelta(seconds=NCCL_TIMEOUT_FACTOR * seconds)
        )
        if nccl_id is not None:
            store.set(NCCL_ID_KEY, base64.b64decode(nccl_id))
        # The first broadcast starts NCCL. It blocks until all members have joined.
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        self._first_broadcast = run_in_background(lambda: self._start_broadcast(byte))
        self._wait(lambda: store.check([NCCL_ID_KEY]) or self._first_broadcast.done())
        if not store.check([NCCL_ID_KEY]):
            self.wait_for_all()  # raises the error of the broadcast
        self.nccl_id = base64.b64encode(store.get(NCCL_ID_KEY)).decode()

    def wait_for_all(self, check: Check = lambda: None) -> None:
        """Wait until all members have joined; see `broadcast`."""

        def first_broadcast() -> Any:
            self._wait(self._first_broadcast.done, check)
            return self._first_broadcast.result()

        self._finish(first_broadcast, check)

    def broadcast(self, flat: Tensor, check: Check = lambda: None) -> None:
        """Send bytes from the trainer to all workers. `check` is called while waiting."""
        if len(flat):
            self._finish(lambda: self._start_broadcast(flat), check)

    def close(self) -> None:
        """Leave the group without waiting for the others."""
        self._nccl.abort()

    def _start_broadcast(self, flat: Tensor) -> Any:
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        return self._nccl.broadcast([flat], options)

    def _finish(self, start: Callable[[], Any], check: Check) -> None:
        """Start a broadcast and wait for it; an error of NCCL becomes a `TransferError`."""
        problem = None
        try:
            work = start()
            self._wait(work.is_completed, check)
            work.wait()
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
        if problem is not None:  # outside `except`, so that it has no cause
            raise TransferError(problem)

    def _wait(self, is_done: Callable[[], bool], check: Check = lambda: None) -> None:
        for _ in poll(self.seconds, MIN_POLL_SECONDS, MAX_POLL_SECONDS):
            if is_done():
                return
            check()
        raise TransferError(f"nothing moved for {self.seconds:g} s")
