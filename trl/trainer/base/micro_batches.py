"""Forward and backward of micro-batches, a chunk at a time, with recovery from out-of-memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...batch import Batch
from ...distributed import Ranks
from ...memory.adaptive_batch import free_memory
from ...memory.phases import Phases
from ...memory.random_numbers import TorchRngState
from ...models.packed_layout import runs_within
from ...models.weights import operations_per_token
from ...online.metrics import MetricStore
from ...ops.in_place import several_passes
from .base_config import BaseConfig
from .policy import router_coefficient

ForwardBackward = Callable[[Batch], Tensor]  # computes both passes; returns the loss ()
Context = Callable[[], AbstractContextManager[Any]]


class MicroBatchRunner:
    """Adds the gradients of an update's micro-batches to `.grad`, a chunk at a time.

    If memory runs out, the update begins again with smaller chunks, the same random numbers and the
    metrics of before: a failed backward pass leaves gradients partly added.
    """

    def __init__(
        self, args: BaseConfig, ranks: Ranks, metrics: MetricStore, model: nn.Module, phases: Phases
    ):
        self._args = args
        self._metrics = metrics
        self._model = model
        self._phases = phases
        # A process cannot go back alone while others wait for the gradient of a failed pass.
        self._size = phases.adaptive("training", alone=ranks.count > 1)
        self._max_tokens = args.piece_tokens if ranks.allows_uneven_passes else 0
        is_default = args.max_tokens_per_piece is None
        if self._max_tokens and is_default and router_coefficient(model, args):
            self._max_tokens = 0  # the load of experts is balanced over all rows of a pass
        self._offloading: Context = nullcontext
        if args.activation_offloading:
            from ...models.activations import ActivationOffloading

            self._offloading = ActivationOffloading(model)
        # Each drops what the micro-batches of an update have left somewhere.
        self.reset_hooks: list[Callable[[], None]] = [model.zero_grad]
        self.done: list[Batch] = []  # micro-batches computed since the last update
        self.operations = 0  # floating-point operations of this rank's last micro-batch
        self._operations_per_token = operations_per_token(model) / ranks.per_row

    def run(
        self, batch: Batch, forward_backward: ForwardBackward, no_sync: Context = nullcontext
    ) -> Tensor:
        """Compute a micro-batch; return its loss (). Ranks exchange gradients in its last chunk.

        `operations` is then an estimate as that of transformers: 6 for each token and each weight
        outside embeddings. What completions share counts once.
        """
        self.operations = round(self._operations_per_token * sum(batch.tokens_per_unit()))
        if not self.done:
            self._begin_update()
        self.done.append(batch)
        recorded = self._metrics.state()
        micro_batches = [batch]
        while (loss := self._attempt(micro_batches, forward_backward, no_sync)) is None:
            self._reset()
            self._metrics.restore(recorded)
            self._random.restore()
            free_memory()
            micro_batches = self.done
        return loss

    def _begin_update(self) -> None:
        self._random = TorchRngState()
        if self._args.selective_checkpointing:
            from ...models.activations import keep_attention

            keep_attention(self._model)

    def _attempt(
        self, micro_batches: list[Batch], forward_backward: ForwardBackward, no_sync: Context
    ) -> Tensor | None:
        """Compute micro-batches; return the loss () of the last one, or None if memory ran out."""
        loss = torch.zeros((), device=self._args.device)
        units = range(0)  # of the chunk that is computed
        try:
            for batch in micro_batches:
                recorded = self._metrics.state()
                loss = torch.zeros_like(loss)
                cuts = self._cuts(batch, self._size.size)
                # An error must leave this block as one: gradients that wait in it are dropped then,
                # but on a normal exit they are added to `.grad`, which takes memory.
                with several_passes() as waiting:
                    for units in cuts:
                        waiting.is_last = units is cuts[-1]
                        context = nullcontext if waiting.is_last else no_sync
                        with self._phases("backward"), context(), self._offloading():
                            loss += forward_backward(batch.select_units(units))
                if batch is not micro_batches[-1]:  # earlier ones recorded their metrics already
                    self._metrics.restore(recorded)
        except Exception as error:
            self._size.shrink(error, units)
            return None
        return loss

    def chunks(self, batch: Batch) -> list[Batch]:
        """Cut a batch into what `max_tokens_per_piece` allows at once, with gradient or without."""
        return [batch.select_units(units) for units in self._cuts(batch)]

    def _cuts(self, batch: Batch, max_units: int | None = None) -> list[range]:
        """The units of each chunk: at most so many, with at most `max_tokens_per_piece` tokens."""
        tokens = batch.tokens_per_unit()
        size = max_units or max(len(tokens), 1)
        cuts = []
        for first in range(0, len(tokens), size):
            part = tokens[first : first + size]
            counts = runs_within(self._max_tokens, part) if self._max_tokens else [len(part)]
            edges = accumulate(counts, initial=first)
            cuts += [range(start, stop) for start, stop in pairwise(edges)]
        return cuts

    def _reset(self) -> None:
        for reset in self.reset_hooks:
            reset()

    def drop_update(self) -> None:
        """Drop the micro-batches of an update that is not finished, and what they left."""
        self._reset()
        self.done.clear()
