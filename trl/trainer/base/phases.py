"""The phases of a training step: their memory is measured, and their batches made to fit."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...distributed import Ranks
from ...memory.adaptive_batch import AdaptiveBatch
from ...memory.meter import PhaseMeter, release_cached_blocks
from ...models.packed_layout import runs_within
from ...models.weights import operations_per_token
from ...online.metrics import MetricStore
from ...ops.in_place import several_passes
from ...progress import begin
from ...random_numbers import TorchRngState
from ...types import Rows
from .base_config import BaseConfig
from .policy import router_coefficient

Step = Callable[[Any], Tensor]  # both passes of some rows: their loss ()
Context = Callable[[], AbstractContextManager[Any]]


class Phases:
    """Wraps what a step of training `model` does in its phases; peaks go to `store`."""

    def __init__(self, args: BaseConfig, ranks: Ranks, store: MetricStore, model: nn.Module):
        self.meter = PhaseMeter(args.device, enabled=args.log_memory)
        self.batches: dict[str, AdaptiveBatch] = {}  # how many rows each works on at once
        self._args = args
        # A process cannot go back alone while others wait for the gradient of a failed pass.
        self._training = self.adaptive("training", alone=ranks.count > 1)
        self._training.unit = args.unit
        self._store = store
        self._model = model
        self._most = args.piece_tokens if ranks.allows_uneven_passes else 0
        if self._most and args.max_tokens_per_piece is None and router_coefficient(model, args):
            self._most = 0  # the load of experts is balanced over all rows of a pass
        self._offloading: Context = nullcontext
        if args.activation_offloading:
            from ...models.activations import ActivationOffloading

            self._offloading = ActivationOffloading(model)
        # They drop what the micro-batches of an update leave behind.
        self.forgets: list[Callable[[], None]] = [model.zero_grad]
        self.done: list[Rows] = []  # micro-batches since the last update
        self.operations = 0  # floating-point, of this rank's last micro-batch
        self._operations_per_token = operations_per_token(model) / ranks.per_row
        self._started = 0.0

    def __call__(self, name: str, rows: int = 0) -> AbstractContextManager[None]:
        """Measure a phase, of this many rows where that is known."""
        begin(name, rows)
        return self.meter.phase(name)

    def adaptive(self, name: str, alone: bool = False) -> AdaptiveBatch:
        """Add a phase whose rows can be cut, unless a process would go back `alone`."""
        self.batches[name] = AdaptiveBatch(name, disabled=alone or not self._args.recover_from_oom)
        return self.batches[name]

    @contextmanager
    def inference(self, name: str, rows: int = 0) -> Iterator[None]:
        """Measure a phase after which cached blocks may go back to the device."""
        with self(name, rows):
            yield
        release_cached_blocks(self._args.empty_cache, self._args.device)

    def train(self, batch: Any, step: Step, quiet: Context = nullcontext) -> Tensor:
        """Run forward and backward on a micro-batch, in pieces if it does not fit: its loss ().

        A failed backward pass leaves gradients partly added, so the update then begins again with
        its first micro-batch. Within `quiet`, ranks do not exchange gradients.

        `operations` is then an estimate as that of transformers: 6 for each token and each weight
        outside embeddings. What completions share counts once.
        """
        self.operations = round(self._operations_per_token * sum(batch.unit_tokens()))
        if not self.done:
            self._random = TorchRngState()
            if self._args.selective_checkpointing:
                from ...models.activations import keep_attention

                keep_attention(self._model)
        earlier = sum(map(len, self.done))
        self.done.append(batch)
        metrics = self._store.state()

        def work(rows: range) -> Tensor:
            loss = torch.zeros((), device=self._args.device)
            for micro_batch, part in self._located(rows):
                known = self._store.state()
                with self("backward"):  # `step` measures its forward within it
                    value = self._in_pieces(part, step, quiet)
                if micro_batch is batch:
                    loss += value
                else:  # its metrics were recorded at the first time
                    self._store.restore(known)
            return loss

        def reset() -> None:
            self._forget()
            self._store.restore(metrics)
            self._random.restore()

        total = earlier + len(batch)
        return torch.stack(self._training.run(total, work, None, reset, earlier)).sum()

    def _in_pieces(self, batch: Any, step: Step, quiet: Context) -> Tensor:
        """One step, or several whose gradients add up; ranks exchange them in the last one."""
        losses, every = [], self.pieces(batch)
        with several_passes() as waiting:
            for piece in every:
                waiting.is_last = piece is every[-1]
                with nullcontext() if waiting.is_last else quiet(), self._offloading():
                    losses.append(step(piece))
        return torch.stack(losses).sum()

    def computes_at_once(self, batch: Any) -> bool:
        """Whether `pieces` leaves these rows whole. Ranks may differ in that."""
        return len(self._sizes(batch)) <= 1

    def pieces(self, batch: Any) -> list[Any]:
        """Cut rows into what is computed at once, with gradient or without."""
        sizes = self._sizes(batch)
        if len(sizes) <= 1:
            return [batch]
        return [batch.select(range(*cut)) for cut in pairwise(accumulate(sizes, initial=0))]

    def _sizes(self, batch: Any) -> list[int]:
        """Rows of each piece; empty where nothing is cut."""
        return runs_within(self._most, batch.unit_tokens()) if self._most else []

    def _located(self, rows: range) -> Iterator[tuple[Any, Any]]:
        first = 0
        for micro_batch in self.done:
            start, stop = max(rows.start - first, 0), min(rows.stop - first, len(micro_batch))
            if start < stop:
                yield micro_batch, micro_batch.select(range(start, stop))
            first += len(micro_batch)

    def _forget(self) -> None:
        for forget in self.forgets:
            forget()

    def drop_update(self) -> None:
        """Drop the micro-batches of an update that is not finished, and what they left."""
        self._forget()
        self.done.clear()

    def begin_update(self) -> None:
        """Start the clock of an update."""
        self._started = time.perf_counter()

    def end_update(self) -> None:
        """Let go of the micro-batches of the update; record its time, and its peaks of memory."""
        # Devices work behind: looking at the gradient's norm has waited for all of the backward.
        self._store.value("step_time", time.perf_counter() - self._started)
        self.done.clear()
        for name, value in self.meter.take().items():
            self._store.maximum(name, torch.tensor(value))
