"""Weights on their way from a trainer to the workers of vLLM servers.

A weight is a header and its bytes, so a receiver knows nothing beforehand. Headers and answers go
over the connections on which both sides have proven the secret. So do the bytes where one side is
on a CPU; between GPUs they go by NCCL, in a group of its own that has nothing to do with that of
training. Imports torch and the standard library: it runs in the workers too.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from ..weight_proof import fingerprint
from .meeting import Deadline, Meeting, Peer, TransferError, in_background

SHORTEST_LOOK, LONGEST_LOOK = 5e-5, 5e-3  # seconds between two looks at a transfer
NCCL_SLACK = 2  # times its deadline, after which NCCL itself gives up
CPU = torch.device("cpu")
NCCL_ID = "0"  # under which torch leaves the identity of its first communicator


class WeightGroup:
    """A trainer and workers, as one of them sees them; all make theirs together.

    Args:
        meeting (`Meeting`): where they met.
        rank (`int`): 0 for the trainer.
        peers: of the trainer all workers in the order of their ranks; of a worker the trainer.
        device (`torch.device`): of this member's weights.

    Raises:
        TransferError: if the others do not come in time.
    """

    def __init__(
        self, meeting: Meeting, rank: int, peers: Sequence[Peer], device: torch.device = CPU
    ):
        self.meeting = meeting
        self._rank = rank
        self._peers = peers
        self._nccl: Any = None
        self._device = device if meeting.on_gpu else CPU
        if meeting.on_gpu:
            self._connect()

    def _connect(self) -> None:
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=NCCL_SLACK * self.meeting.seconds)
        # NCCL's members find each other by an identity, which the trainer's makes. A store of this
        # process alone holds it: it travels where both sides have proven the secret.
        store = distributed.HashStore()
        self._nccl = distributed.ProcessGroupNCCL(store, self._rank, self.meeting.size, options)
        if self._rank:
            store.set(NCCL_ID, base64.b64decode(self._peers[0].hear()))
        first = torch.zeros(1, dtype=torch.uint8, device=self._device)
        begun = in_background(lambda: self._start(first))  # returns once all have come
        if self._rank == 0:
            self._wait(lambda: store.check([NCCL_ID]) or begun.done())
            if begun.done():
                begun.result()  # it failed, or there is nobody else
            self._tell_all(base64.b64encode(store.get(NCCL_ID)).decode())
        self._wait(begun.done)
        begun.result().wait()

    def close(self) -> None:
        """Leave, without waiting for anyone."""
        for peer in self._peers:
            peer.close()
        if self._nccl is not None:
            self._nccl.abort()
        self._nccl = None

    # --- The trainer ---

    def send(self, name: str, weight: Tensor) -> None:
        """Send one weight, of any shape, under its name in a checkpoint.

        Raises:
            TransferError: if it does not get through in time.
        """
        self._check()  # what is sent to a process that has just ended would get lost in buffers
        flat = weight.detach().to(self._device).contiguous()
        header = {
            "name": name,
            "dtype": str(weight.dtype).removeprefix("torch."),
            "shape": list(weight.shape),
            "fingerprint": fingerprint(flat).item(),
        }
        self._tell_all(header)
        if self._nccl is not None:
            self._broadcast(_as_bytes(flat))
            return
        for peer in self._peers:
            peer.send(memoryview(_as_bytes(flat).numpy()))

    def end(self) -> None:
        """Tell the receivers that this was all."""
        self._tell_all({"name": None})

    def answers(self) -> list[Any]:
        """What each worker tells.

        Raises:
            TransferError: if one tells nothing in time.
        """
        return [peer.hear() for peer in self._peers]

    def _tell_all(self, words: Any) -> None:
        for peer in self._peers:
            peer.tell(words)

    def _check(self) -> None:
        """Raise `TransferError` if one of the others has left."""
        for peer in self._peers:
            peer.check()

    # --- A worker ---

    def receive(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield name, weight and whether it is what was sent, until the sender says it was all.

        Raises:
            TransferError: if the next one does not come in time.
        """
        trainer = self._peers[0]
        while (header := trainer.hear())["name"] is not None:
            dtype = getattr(torch, header["dtype"])
            weight = torch.empty(header["shape"], dtype=dtype, device=self._device)
            flat = _as_bytes(weight)
            if self._nccl is not None:
                self._broadcast(flat)
            else:
                trainer.receive(memoryview(flat.numpy()))
            yield header["name"], weight, fingerprint(weight).item() == header["fingerprint"]

    def answer(self, words: Any) -> None:
        """Tell the trainer what JSON can hold."""
        self._peers[0].tell(words)

    # --- NCCL ---

    def _broadcast(self, flat: Tensor) -> None:
        """Hand bytes from the trainer's GPU to all."""
        if not flat.numel():
            return
        words = None
        try:
            work = self._start(flat)
            self._wait(work.is_completed)
            work.wait()
        except RuntimeError as error:  # of NCCL
            words = str(error).splitlines()[0]
        if words is not None:
            raise TransferError(words)

    def _start(self, flat: Tensor) -> Any:
        options = distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        return self._nccl.broadcast([flat], options)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        deadline, pause = Deadline(self.meeting.seconds), SHORTEST_LOOK
        while not is_done():
            self._check()
            if deadline.has_passed:
                raise TransferError(f"nothing moved for {deadline.seconds:g} s")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_LOOK)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
