"""What runs in the workers of a vLLM server: it takes weights, proves them, and tells what it is.

`trl vllm-serve` names the class to vLLM (`--worker-extension-cls`), which mixes it into its own and
lets the trainer call its methods. Imported by vLLM alone.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from ....imports import require
from ..engine import keep_weights_unpacked
from ..weight_proof import WeightProof
from .compat import PROTOCOL, ServerFacts, gpu_id, shape_of
from .meeting import Meeting, join
from .weight_stream import WeightGroup


class Receiver:
    """Takes the weights of one trainer.

    Args:
        group (`WeightGroup`): in which they come.
        model (`nn.Module`): of the engine.
    """

    def __init__(self, group: WeightGroup, model: Any):
        self.group = group
        self.held: int | None = None
        self._model = model
        self._device = next(model.parameters()).device
        self._proof = WeightProof(model)
        self._has_doubted = False

    def receive(self, sync: int) -> None:
        """Take all weights of a sync, and tell the trainer what is wrong then."""
        self.held = None
        problem = None
        with torch.no_grad():
            for name, weight, is_whole in self.group.receive():
                # After a problem the rest is taken all the same, for the sender goes on.
                if problem is None and not is_whole:
                    problem = f"{name} did not arrive as it was sent"
                if problem is None:
                    problem = self._load(name, weight)
        found = self._proof.problem()  # which forgets what was sent, in any case
        problem = problem or found
        if problem is None:
            self.held = sync
        doubt = None if self._has_doubted else self._proof.doubt
        self._has_doubted = True
        self.group.answer([problem, doubt])

    def load(self, name: str, weight: torch.Tensor) -> None:
        """Write one weight, under the name it has in a checkpoint, in place."""
        self._model.load_weights([(name, weight)])

    def _load(self, name: str, weight: torch.Tensor) -> str | None:
        try:
            self._proof.load(name, weight.to(self._device), self.load)
        except Exception as error:  # whatever a model's loader raises
            return f"{name} cannot be loaded ({type(error).__name__}: {error})"
        return None


class WeightWorker:
    """Methods of a worker for a trainer; all names begin with `trl_`, to stay apart."""

    _trl_receiver_type = Receiver
    _trl_receiver: Receiver | None = None

    def trl_describe(self) -> dict[str, Any]:
        """What the trainer compares with its policy and options."""
        worker: Any = self
        model = worker.model_config
        parallel = worker.vllm_config.parallel_config
        facts = ServerFacts(
            protocol=PROTOCOL,
            vllm=require("vllm", "trl vllm-serve").__version__,
            shape=shape_of(model.hf_config),
            dtype=str(model.dtype).removeprefix("torch."),
            context=model.max_model_len,
            logprobs_mode=str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            workers=parallel.world_size * parallel.data_parallel_size,
            gpu=gpu_id(worker.device),
        )
        return asdict(facts)

    def trl_join(self, meeting: dict[str, Any], first_rank: int) -> None:
        """Meet a trainer; one that was met before is left.

        Args:
            meeting: arguments of `Meeting`.
            first_rank (`int`): in the group, of this server's first worker.
        """
        worker: Any = self
        parallel = worker.vllm_config.parallel_config
        place = parallel.data_parallel_index * parallel.world_size + worker.rank
        if self._trl_receiver is not None:
            self._trl_receiver.group.close()
        self._trl_receiver = None
        where, rank = Meeting(**meeting), first_rank + place
        group = WeightGroup(where, rank, [join(where, rank)], worker.device)
        self._trl_receiver = self._trl_receiver_type(group, worker.get_model())

    def trl_receive(self, run: str, sync: int) -> None:
        """Take all weights, and tell the trainer what is wrong with what the engine then holds."""
        receiver = self._trl_receiver
        if receiver is None or receiver.group.meeting.run != run:
            raise RuntimeError("Another trainer has connected to this server since.")
        try:
            receiver.receive(sync)
        except BaseException:  # the trainer sees that this worker has left, whatever it waits for
            self._trl_receiver = None
            receiver.group.close()
            raise

    def trl_held(self) -> list[Any]:
        """Run and number of the sync whose weights the engine holds; nothing if it holds none."""
        found = self._trl_receiver
        return [] if found is None or found.held is None else [found.group.meeting.run, found.held]


keep_weights_unpacked("trl vllm-serve")  # before vLLM loads a model
