"""What the output projection and the log-probabilities take, in bytes.

The logits of M tokens exist one tile of tokens x vocabulary entries at a time, or all at once if
the chunk is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ops.linear_logprobs import (
    CHUNK_ON_ACCELERATOR,
    CHUNK_ON_CPU,
    PRODUCT_ELEMENTS,
    TOKENS_IN_TILE,
)
from ..ops.logprobs import BLOCK_ELEMENTS
from .layer import FLOAT32
from .model_size import ModelSize

FLOAT64 = 8


@dataclass(frozen=True)
class Head:
    """The output projection of a model over M tokens.

    Args:
        model (`ModelSize`): its widths.
        weight (`int`): bytes of an entry of the weight and of the hidden states.
        product (`int`): bytes of an entry that matrix products read and write.
        chunk (`int`, *optional*): logits held at once. None: the default; 0: all.
        on_cpu (`bool`): which default.
    """

    model: ModelSize
    weight: int
    product: int
    chunk: int | None = None
    on_cpu: bool = False

    def forward(self, tokens: int) -> float:
        """Bytes of the forward pass: hidden states of the tokens, and their logits."""
        kept = self.weight * tokens * self.model.hidden
        if self.chunk == 0:
            logits = tokens * self.model.vocabulary
            # Products next to float32 logits; then blocks of scaled ones and of probabilities.
            working = max(self.product * logits, self._blocks(logits, 2))
            return kept + self.whole_cast + FLOAT32 * logits + working
        rows, entries = self._tile(tokens)
        # Products become float32 next to the logits of the tile before.
        each = 2 * FLOAT32 + self._narrow
        return kept + self._casts(tokens, entries) + rows * entries * each

    def backward(self, tokens: int) -> float:
        """Bytes of the backward pass, with the gradient of the weight, which is made anew."""
        kept = self.weight * tokens * self.model.hidden
        if self.chunk == 0:
            logits = tokens * self.model.vocabulary
            # Their gradient, made in blocks from scaled logits, probabilities and a gradient; then
            # the gradients of the products and of the weight.
            first = FLOAT32 * logits + self._blocks(logits, 3)
            then = self._narrow * logits + self.gradient
            return kept + self.whole_cast + FLOAT32 * logits + max(first, then)
        rows, entries = self._tile(tokens)
        gradient = FLOAT32 * tokens * self.model.hidden + self.gradient
        sums = 0 if self.model.frozen else FLOAT32 * entries * self.model.hidden
        # Next to logits and gradient of a tile: logits of the next one, or what is added to sums.
        each = 2 * FLOAT32 + self._narrow
        added = self._narrow * min(PRODUCT_ELEMENTS, max(rows, entries) * self.model.hidden)
        working = rows * entries * each + max(FLOAT32 * rows * entries, added)
        return kept + gradient + sums + self._casts(tokens, entries) + working

    def sampling(self, rows: int) -> float:
        """Bytes of drawing one token for each of so many rows, some rows at a time."""
        most = max(1, (self.chunk or self._default) // self.model.vocabulary)
        # Logits and log-probabilities; probabilities in float64 and their running sum.
        return min(rows, most) * self.model.vocabulary * (2 * FLOAT32 + 2 * FLOAT64)

    def sampling_at_once(self, rows: int) -> float:
        """The same for all rows at once, in `generate` of transformers."""
        # Logits, their copy, the scores of the step before; probabilities and their running sum.
        return rows * self.model.vocabulary * (3 * FLOAT32 + 2 * FLOAT64)

    @property
    def whole_cast(self) -> float:
        """Bytes of the copy of the whole weight that autocast makes when the module is called."""
        return self._cast * self.model.head

    def _blocks(self, logits: int, count: int) -> int:
        """Bytes of so many tensors of a block of logits; of the block before, one is held too."""
        count += logits > BLOCK_ELEMENTS
        return count * FLOAT32 * min(logits, BLOCK_ELEMENTS)

    @property
    def _default(self) -> int:
        return CHUNK_ON_CPU if self.on_cpu else CHUNK_ON_ACCELERATOR

    @property
    def gradient(self) -> float:
        """Bytes of the gradient of the weight, made anew in each backward pass."""
        return 0 if self.model.frozen else self.weight * self.model.head

    @property
    def _narrow(self) -> int:
        """Bytes of a product that must be widened to float32."""
        return self.product if self.product < FLOAT32 else 0

    def _tile(self, tokens: int) -> tuple[int, int]:
        """Tokens and vocabulary entries of a tile."""
        chunk = self.chunk or self._default
        rows = max(1, min(TOKENS_IN_TILE, chunk // 64, tokens))
        entries = max(64, chunk // max(1, min(TOKENS_IN_TILE, tokens)))
        return rows, min(entries, self.model.vocabulary)

    @property
    def _cast(self) -> int:
        """Bytes of an entry that autocast casts."""
        return self.product if self.product != self.weight else 0

    def _casts(self, tokens: int, entries: int) -> int:
        """Bytes of the casts of the hidden states, and of the weight's rows for a tile."""
        return self._cast * (tokens + entries) * self.model.hidden
