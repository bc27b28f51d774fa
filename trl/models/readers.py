"""What is read off the last hidden states of a forward: log-probabilities, and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..ops.logprobs import token_scores
from ..ops.support import Support
from .lm_head import OutputHead
from .packed_layout import Layout
from .unwrap import Capture, causal_model


@dataclass(frozen=True)
class Hidden:
    """Last hidden states of the tokens of a layout."""

    layout: Layout
    capture: Capture
    logits: Tensor | None = None  # (B, c, V) of the last c tokens of plain rows, without a head

    def at(self, places: Tensor) -> Tensor:
        """States (n, H) of tokens (n,)."""
        if self.capture.hidden is None:
            raise RuntimeError("The decoder of the model returned no hidden states to read.")
        width = self.layout.inputs["input_ids"].shape[1]
        return self.capture.hidden[:, -width:].flatten(0, 1)[places]  # without virtual tokens


class Reader:
    """Turns hidden states into what it is asked for; one forward serves several readers."""

    what = ""  # is read first, in plural
    can_pack = True  # whether rows may lie behind one copy of their prompt
    has_unit = True  # False: differences of two readings are compared by the size of these
    at_end = False  # whether the last token of each row is read, which predicts nothing

    def __call__(self, hidden: Hidden) -> tuple[Tensor | None, ...]:
        """What was read, in the shape of the rows: (B, C) or (B,)."""
        raise NotImplementedError


@dataclass(frozen=True)
class TokenReader(Reader):
    """Log-probabilities (B, C) of completion tokens, 0 beyond their end, and what else is asked."""

    head: OutputHead | None  # None: the model's own logits are read, which takes plain rows
    temperature: float = 1.0  # of those logits; a head knows its own
    with_entropy: bool = False  # of each next-token distribution, and if the token is the likeliest
    support: Support | None = None  # also the mass that these filters leave of it
    what = "log-probabilities"

    @property
    def can_pack(self) -> bool:  # type: ignore[override]
        """The model's own logits are read of plain rows."""
        return self.head is not None

    def __call__(self, hidden: Hidden) -> tuple[Tensor | None, ...]:
        """Read (log-probabilities, entropies, hits, log-masses)."""
        layout = hidden.layout
        if self.head is None:
            logits = torch.as_tensor(hidden.logits)
            found: Sequence[Tensor | None] = [*self._of_logits(logits, layout)]
        else:
            states, options = hidden.at(layout.sources), (self.with_entropy, self.support)
            found = self.head.scores(states, layout.targets, hidden.capture.autocast, *options)
        return tuple(None if values is None else layout.scatter(values) for values in found)

    def _of_logits(self, logits: Tensor, layout: Layout) -> Iterator[Tensor | None]:
        """Predictions (M,) of plain rows, from logits of their last tokens."""
        ids, logits = layout.inputs["input_ids"], logits[:, -layout.last :]
        width, first = ids.shape[1], ids.shape[1] - logits.shape[1]
        row, column = layout.sources // width, layout.sources % width - first
        targets = ids[:, first:].roll(-1, 1)  # the last token of a row predicts nothing
        statistics = token_scores(logits, targets, self.temperature, self.with_entropy)
        for values in (*statistics, self._log_mass(logits.detach(), targets)):
            yield None if values is None else values[row, column]

    def _log_mass(self, logits: Tensor, targets: Tensor) -> Tensor | None:
        """Mass of the support (B, c), a row's logits in float32 at a time."""
        if self.support is None:
            return None
        rows = zip(logits, targets, strict=True)
        return torch.stack(
            [self.support.log_mass(row.float() / self.temperature, ids) for row, ids in rows]
        )


def score_layer(model: nn.Module) -> nn.Module | None:
    """The layer by which a classifier scores the last token; None if it scores all, as encoders."""
    causal = causal_model(model)
    has_one = isinstance(causal, PreTrainedModel) and not causal.config.is_encoder_decoder
    return getattr(causal, "score", None) if has_one else None


@dataclass(frozen=True)
class ValueReader(Reader):
    """Values by a linear layer from H to 1, in its own precision whatever autocast says."""

    module: nn.Module  # a part of the model that is scored
    # (B,) at the last token of each row, 0 for rows without tokens; else (B, C), at the place
    # before each completion token, 0 beyond a completion's end.
    at_end: bool = False
    what = "values"
    has_unit = False

    def __call__(self, hidden: Hidden) -> tuple[Tensor]:
        """Read (values,)."""
        layout = hidden.layout
        states = hidden.at(layout.ends if self.at_end else layout.sources)
        parameter = next(self.module.parameters(), states)
        with torch.autocast(states.device.type, enabled=False):
            values = self.module(states.to(parameter.dtype)).squeeze(-1)
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        return (layout.by_row(values) if self.at_end else layout.scatter(values),)
