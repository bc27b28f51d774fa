"""Runs in the workers of a vLLM server: receives and verifies weights, and reports the server.

`trl vllm-serve` passes the class to vLLM (`--worker-extension-cls`), which adds it to the bases of
its worker class; the trainer calls its methods by HTTP. Only vLLM imports this module.
"""

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ....imports import require
from ..engine import keep_weights_unpacked
from ..weight_verifier import WeightVerifier, fingerprint
from .client import PROTOCOL, ServerFacts, gpu_id, model_shape
from .weight_stream import WeightBatch, WeightGroup, unpack_message


class WeightReceiver:
    """Loads the weights of one run into an engine's model.

    Bytes come in messages, or over a process group if there is one.
    """

    def __init__(self, run_id: str, model: nn.Module, group: WeightGroup | None = None):
        self.run_id = run_id
        self.group = group
        self.held_sync: int | None = None  # whose weights the engine holds; None: unknown
        self._model = model
        self._device = next(model.parameters()).device
        self._verifier = WeightVerifier(model)
        self._problem: str | None = None  # the first one in this sync

    @torch.no_grad()
    def receive(self, head: dict[str, Any], body: memoryview) -> None:
        """Receive and load a batch. After a problem, further batches are received but not loaded.

        Other members of the group would wait if they were not received.
        """
        self.held_sync = None
        device = "cpu" if self.group is None else self._device
        flat = torch.empty(head["size"], dtype=torch.uint8, device=device)
        batch = WeightBatch(head["headers"], flat)
        if self.group is None:
            memoryview(flat.numpy())[:] = body
        else:
            self.group.broadcast(flat)
        if fingerprint(flat).item() != head["fingerprint"] and self._problem is None:
            names = batch.first_name
            if len(batch.headers) > 1:
                names += f" or one of {len(batch.headers) - 1} more in its batch"
            self._problem = f"{names} was damaged in transfer"
        if self._problem is not None:
            return
        for name, weight in batch.weights():
            try:
                self._verifier.load(name, weight.to(self._device), self.load)
            except Exception as error:  # a model's loader may raise anything
                self._problem = f"{name} cannot be loaded ({type(error).__name__}: {error})"
                break

    def verify(self, sync: int) -> list[str | None]:
        """Verify the weights of a sync; return an error text and a warning, each or None."""
        mismatch = self._verifier.finish_sync()  # called in any case: it starts the next sync
        problem = self._problem or mismatch
        self._problem = None
        self.held_sync = sync if problem is None else None
        return [problem, self._verifier.warning]

    def load(self, name: str, weight: torch.Tensor) -> None:
        """Write a weight, named as in a checkpoint, in place."""
        self._model.load_weights([(name, weight)])


class WeightWorker:
    """Methods of a worker that the trainer calls. Their prefix keeps them apart from vLLM's."""

    _trl_receiver: WeightReceiver | None = None

    def trl_describe(self) -> dict[str, Any]:
        """Return the `ServerFacts` that the trainer compares with its policy and options."""
        worker: Any = self
        model = worker.model_config
        parallel = worker.vllm_config.parallel_config
        facts = ServerFacts(
            protocol=PROTOCOL,
            vllm=require("vllm", "trl vllm-serve").__version__,
            shape=model_shape(model.hf_config),
            dtype=str(model.dtype).removeprefix("torch."),
            context=model.max_model_len,
            logprobs_mode=str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            workers=parallel.world_size * parallel.data_parallel_size,
            gpu=gpu_id(worker.device),
        )
        return asdict(facts)

    def trl_join(
        self, run_id: str, nccl_id: str | None, ranks: tuple[int, int], seconds: float
    ) -> None:
        """Receive the weights of a run from now on, and of no other run.

        With an `nccl_id`, bytes come over a process group; `ranks` are the rank of this server's
        first worker in it, and its size. Without one, bytes come in messages.
        """
        worker: Any = self
        if self._trl_receiver is not None and self._trl_receiver.group is not None:
            self._trl_receiver.group.close()
        self._trl_receiver = None
        group = None
        if nccl_id is not None:
            first_rank, size = ranks
            parallel = worker.vllm_config.parallel_config
            own_index = parallel.data_parallel_index * parallel.world_size + worker.rank
            group = WeightGroup(first_rank + own_index, size, worker.device, seconds, nccl_id)
            group.wait_for_all()
        self._trl_receiver = WeightReceiver(run_id, worker.get_model(), group)

    def trl_receive(self, message: bytes) -> None:
        """Receive a batch of weights; see `WeightBatch.to_message`."""
        head, body = unpack_message(message)
        self._trl_receiver_of(head["run"]).receive(head, body)

    def trl_prove(self, run_id: str, sync: int) -> list[str | None]:
        """Verify that the engine holds the weights of a sync; see `WeightReceiver.verify`."""
        return self._trl_receiver_of(run_id).verify(sync)

    def trl_held(self) -> list[Any]:
        """Return the run id and sync whose weights the engine holds; empty if it holds none."""
        receiver = self._trl_receiver
        if receiver is None or receiver.held_sync is None:
            return []
        return [receiver.run_id, receiver.held_sync]

    def _trl_receiver_of(self, run_id: str) -> WeightReceiver:
        if self._trl_receiver is None or self._trl_receiver.run_id != run_id:
            raise RuntimeError("Another trainer has connected to this server since.")
        return self._trl_receiver


keep_weights_unpacked("trl vllm-serve")  # before vLLM loads a model
