"""Readers of hidden states: log-probabilities of tokens; base class of others."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.logit_statistics import LogitStatistic
from ..ops.logprobs import token_scores
from ..types import TokenScores
from .lm_head import OutputHead
from .packed_layout import Layout
from .unwrap import Capture

# The results of a reader: (B, C) or (B,). Only the first is never None.
Readings = tuple[Tensor | None, ...]


def first_reading(readings: Readings) -> Tensor:
    """Return the first result of a reader; a RuntimeError if it is None."""
    first = readings[0]
    if first is None:
        raise RuntimeError("A reader returned None as its first result.")
    return first


@dataclass(frozen=True)
class Hidden:
    """Last hidden states of the tokens of a layout."""

    layout: Layout
    capture: Capture
    logits: Tensor | None = None  # (B, c, V) of the last c tokens of plain rows, without a head

    def at(self, indices: Tensor) -> Tensor:
        """Return the states (n, H) of tokens with the given indices (n,)."""
        width = self.layout.inputs["input_ids"].shape[1]
        states = self.capture.states()[:, -width:]  # without virtual tokens
        return states.flatten(0, 1)[indices]

    def last_logits(self) -> Tensor:
        """Return the model's own logits; a RuntimeError if it returned none."""
        if self.logits is None:
            raise RuntimeError("The model returned no logits to read.")
        return self.logits


class Reader:
    """Computes numbers of tokens or rows from hidden states; one forward serves several readers."""

    quantity = ""  # what the first result is, as a plural noun for messages
    # How the check compares two layouts: by their difference, or by that over the largest value.
    compares_relatively = False
    at_last_token = False  # reads the last token of each row, which predicts nothing

    @property
    def can_pack(self) -> bool:
        """Whether rows may share one copy of their prompt; not for a model's own logits."""
        return getattr(self, "head", True) is not None

    def __call__(self, hidden: Hidden) -> Readings:
        """Read hidden states."""
        raise NotImplementedError


@dataclass(frozen=True)
class TokenReader(Reader):
    """Reads log-probabilities of completion tokens: (B, C), 0 beyond a completion's end."""

    head: OutputHead | None  # None: the model's own logits are read, which needs plain rows
    temperature: float = 1.0  # of those logits; a head has its own
    with_entropy: bool = False  # also entropies, and whether tokens are the top prediction
    statistic: LogitStatistic | None = None  # also this statistic of each next-token distribution
    quantity = "log-probabilities"

    def __call__(self, hidden: Hidden) -> Readings:
        """Read (log-probabilities, entropies, hits, statistic)."""
        layout = hidden.layout
        predictions: Sequence[Tensor | None]
        if self.head is None:
            predictions = self._from_logits(hidden.last_logits(), layout)
        else:
            predictions = self.head.scores(
                hidden.at(layout.sources),
                layout.targets,
                hidden.capture.autocast,
                self.with_entropy,
                self.statistic,
            )
        return tuple(None if values is None else layout.scatter(values) for values in predictions)

    def scores(
        self,
        readings: Readings,
        values: Tensor | None = None,
        aux_loss: Tensor | None = None,
    ) -> TokenScores:
        """Turn what a call returned into scores; add values (B, C) and a load-balancing loss ()."""
        _, entropies, hits, statistic = readings
        named: dict[str, Tensor | None] = {}
        if self.statistic is not None:
            named[self.statistic.name] = statistic
        return TokenScores(
            logps=first_reading(readings),
            entropies=entropies,
            hits=hits,
            values=values,
            aux_loss=aux_loss,
            **named,
        )

    def _from_logits(self, logits: Tensor, layout: Layout) -> list[Tensor | None]:
        """Predictions (M,) of plain rows, from logits of their last tokens."""
        ids = layout.inputs["input_ids"]
        width = ids.shape[1]
        logits = logits[:, -layout.logits_to_keep :]
        first = width - logits.shape[1]
        row = layout.sources // width
        column = layout.sources % width - first
        targets = ids[:, first:].roll(-1, 1)  # the last token of a row predicts nothing
        statistic = None
        if self.statistic is not None:
            # One row at a time, as logits become float32.
            statistic = torch.stack(
                [
                    self.statistic.compute(row_logits.float() / self.temperature, row_targets)
                    for row_logits, row_targets in zip(logits.detach(), targets, strict=True)
                ]
            )
        scores = token_scores(logits, targets, self.temperature, self.with_entropy)
        return [None if x is None else x[row, column] for x in (*scores, statistic)]
