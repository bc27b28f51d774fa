"""How many rows are generated at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...models.unwrap import causal_model


@dataclass(frozen=True)
class BatchLimits:
    """Bounds of what one call holds; None means no bound."""

    rows: int | None = None  # completions that decode together
    cache_bytes: float | None = None  # of their keys and values, at their longest

    def cut(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, model: Any, shared: bool
    ) -> Iterator[range]:
        """Cut rows into runs within the bounds, of one row at least.

        With `shared`, rows of a prompt read one copy of it.
        """
        per_token = 0 if self.cache_bytes is None else cache_bytes_per_token(model)
        start, tokens = 0, 0
        for row, prompt in enumerate(prompts):
            is_known = shared and row > start and list(prompts[row - 1]) == list(prompt)
            needed = max_tokens + (0 if is_known else len(prompt))
            if row > start and not self._hold(row + 1 - start, (tokens + needed) * per_token):
                yield range(start, row)
                start, tokens, needed = row, 0, max_tokens + len(prompt)
            tokens += needed
        if prompts:
            yield range(start, len(prompts))

    def _hold(self, rows: int, cache_bytes: float) -> bool:
        return rows <= (self.rows or rows) and cache_bytes <= (self.cache_bytes or cache_bytes)


def cache_bytes_per_token(model: Any) -> int:
    """Bytes of the keys and values of one token in all layers, in the dtype of the weights."""
    causal = causal_model(model)
    config = causal.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * causal.dtype.itemsize)
