"""What runs in the workers of a vLLM server: it takes weights, proves them, and tells what it is.

`trl vllm-serve` names the class to vLLM (`--worker-extension-cls`), which mixes it into its own and
lets the trainer call its methods. Imported by vLLM alone.
"""

from dataclasses import asdict
from typing import Any

import torch

from ....imports import require
from ..engine import keep_weights_unpacked
from ..weight_verifier import WeightVerifier, fingerprint
from .client import PROTOCOL, ServerFacts, gpu_id, model_shape
from .weight_stream import Batch, WeightGroup, unpack_message


class WeightReceiver:
    """Takes the weights of one run into an engine's model: from messages, or over a group."""

    def __init__(self, run: str, model: Any, group: WeightGroup | None = None):
        self.run = run
        self.group = group
        self.held: int | None = None
        self._model = model
        self._device = next(model.parameters()).device
        self._proof = WeightVerifier(model)
        self._problem: str | None = None

    @torch.no_grad()
    def receive(self, head: dict[str, Any], body: memoryview) -> None:
        """Take the weights of a message; after a problem the rest is taken all the same."""
        self.held = None
        device = "cpu" if self.group is None else self._device
        batch = Batch(head["headers"], torch.empty(head["size"], dtype=torch.uint8, device=device))
        if self.group is None:
            memoryview(batch.flat.numpy())[:] = body
        else:
            self.group.broadcast(batch.flat)
        if fingerprint(batch.flat).item() != head["fingerprint"]:
            more = f" or one of {len(batch.headers) - 1} more" if len(batch.headers) > 1 else ""
            words = f"{batch.name}{more} did not arrive as it was sent"
            self._problem = self._problem or words
        for name, weight in batch.weights() if self._problem is None else ():
            try:
                self._proof.load(name, weight.to(self._device), self.load)
            except Exception as error:  # whatever a model's loader raises
                self._problem = f"{name} cannot be loaded ({type(error).__name__}: {error})"
                break

    def prove(self, sync: int) -> list[str | None]:
        """Compare what the engine holds with what was sent: what is wrong, and what is unproven."""
        found = self._proof.problem()  # which forgets what was sent, in any case
        problem, self._problem = self._problem or found, None
        self.held = sync if problem is None else None
        return [problem, self._proof.doubt]

    def load(self, name: str, weight: torch.Tensor) -> None:
        """Write one weight, under the name it has in a checkpoint, in place."""
        self._model.load_weights([(name, weight)])


class WeightWorker:
    """Methods of a worker for a trainer; all names begin with `trl_`, to stay apart."""

    _trl_receiver: WeightReceiver | None = None

    def trl_describe(self) -> dict[str, Any]:
        """What the trainer compares with its policy and options."""
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
        self, run: str, identity: str | None, ranks: tuple[int, int], seconds: float
    ) -> None:
        """Take the weights of a run from now on, and of no other.

        Bytes come over the group of an identity, or in messages if there is none. `ranks` are that
        of this server's first worker in the group, and its size.
        """
        worker: Any = self
        parallel = worker.vllm_config.parallel_config
        place = parallel.data_parallel_index * parallel.world_size + worker.rank
        if self._trl_receiver is not None and self._trl_receiver.group is not None:
            self._trl_receiver.group.close()
        self._trl_receiver = group = None
        if identity is not None:
            first, size = ranks
            group = WeightGroup(first + place, size, worker.device, seconds, identity)
            group.wait_for_all()
        self._trl_receiver = WeightReceiver(run, worker.get_model(), group)

    def trl_receive(self, message: bytes) -> None:
        """Take a message with weights; see `Batch.packed`."""
        head, body = unpack_message(message)
        self._trl_receiver_of(head["run"]).receive(head, body)

    def trl_prove(self, run: str, sync: int) -> list[str | None]:
        """Prove that the engine holds all weights that it was sent; see `WeightReceiver.prove`."""
        return self._trl_receiver_of(run).prove(sync)

    def _trl_receiver_of(self, run: str) -> WeightReceiver:
        if self._trl_receiver is None or self._trl_receiver.run != run:
            raise RuntimeError("Another trainer has connected to this server since.")
        return self._trl_receiver

    def trl_held(self) -> list[Any]:
        """Run and number of the sync whose weights the engine holds; nothing if it holds none."""
        found = self._trl_receiver
        return [] if found is None or found.held is None else [found.run, found.held]


keep_weights_unpacked("trl vllm-serve")  # before vLLM loads a model
