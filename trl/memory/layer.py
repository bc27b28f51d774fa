"""What one token costs in one decoder layer, in bytes.

The layer is that of Llama and its descendants: norm, attention, residual, norm, gated MLP,
residual. Each term names a tensor that autograd keeps or that lives at the moment of the peak.
"""

from __future__ import annotations

from dataclasses import dataclass

from .model_size import ModelSize

FLOAT32 = 4


@dataclass(frozen=True)
class Layer:
    """One decoder layer of a model.

    Args:
        model (`ModelSize`): the widths.
        residual (`int`): bytes of an entry of the residual stream; that of the weights.
        product (`int`): bytes of an entry that matrix products read and write. It differs from
            `residual` under autocast.
        on_cpu (`bool`): dropout keeps a mask of its input's dtype there, and booleans elsewhere.
        repeats (`bool`): keys and values are copied for every query head that reads them, as
            attention to shared prompts does on GPUs.
    """

    model: ModelSize
    residual: int
    product: int
    on_cpu: bool = False
    repeats: bool = False

    @property
    def autocast(self) -> bool:
        """Whether operands of matrix products are cast."""
        return self.residual != self.product

    @property
    def stream(self) -> int:
        """The residual stream: what a checkpoint keeps of a layer."""
        return self.residual * self.model.hidden

    @property
    def once(self) -> int:
        """What all layers share: the embedding of the token, and its rotation's cosine and sine."""
        return self.stream + self.rotation

    @property
    def rotation(self) -> int:
        """Cosine and sine of a token's position."""
        return 2 * self.residual * self.model.head_size

    @property
    def last_norm(self) -> int:
        """What the norm behind the last layer keeps: its input in float32, and its factor."""
        return FLOAT32 * self.model.hidden + (0 if self.model.frozen else self.stream)

    def keys_and_values(self, shared: bool) -> int:
        """What the cache keeps: keys and values.

        Args:
            shared (`bool`): the cache of shared prompts, which keeps keys as narrow as values;
                elsewhere rotation makes them as wide as the stream.
        """
        rotated = self.product if shared else max(self.residual, self.product)
        return (rotated + self.product) * self.model.keys

    def saved(self, has_input: bool = True) -> int:
        """What autograd keeps for the backward pass of the layer.

        Args:
            has_input (`bool`): count the layer's input too.
        """
        return (self.stream if has_input else 0) + self._saved_attention() + self._saved_mlp()

    def inference(self, tokens: int, tails: int = 0) -> float:
        """The largest working set of a forward pass without gradient.

        Args:
            tokens (`int`): of the forward.
            tails (`int`): those among them that attend to a shared prefix and to themselves.
        """
        model, wide = self.model, max(self.residual, self.product)
        # The layer's input, the result of attention and its norm; both factors of the MLP and their
        # product.
        mlp = 3 * self.stream + (3 if model.gated else 2) * self.product * model.intermediate
        # The input and its norm; a query, its two rotated terms and their sum; keys and values.
        rotation = 2 * self.stream + (self._projected + 3 * wide) * model.queries
        rotation += (self._projected + self.product) * model.keys
        attention = 2 * self.stream + self.product * 2 * (model.queries + model.keys)
        attention += wide * (model.queries + model.keys) if self.autocast else 0
        attention += self._repeated
        # Copies of queries, keys and values; results over the prefix and over the tail; and while
        # they are averaged the weighted one, and the sum before and after.
        merging = self.product * (7 * model.queries + 2 * model.keys)
        return max(mlp * tokens, rotation * tokens, attention * tokens + merging * tails)

    def backward(self, tokens: int, tails: int = 0) -> float:
        """The largest working set of the backward pass of a layer whose tensors are all kept.

        Args:
            tokens (`int`), tails (`int`): as in `inference`.
        """
        model = self.model
        # Gradients of the result, of both factors of the MLP and of their product, whose own value
        # has just been freed.
        factors = (2 if model.gated else 1) * self.product * model.intermediate
        cast = self.product * model.hidden if self.autocast else 0
        mlp = self._saved_mlp() + self.stream + cast + factors
        # The gradients of the result, of queries, keys and values.
        attention = self.product * 2 * (model.queries + model.keys) + 2 * self._repeated
        # For tails: copies of all that attention kept (the kernel copies the result once more) and
        # of the gradient of its result; and gradients, next to those of the attention to prefixes.
        merging = self.product * (6 * model.queries + 4 * model.keys)
        always = (self.stream + self._saved_attention()) * tokens
        return always + max(mlp * tokens, (self.stream + attention) * tokens + merging * tails)

    @property
    def _repeated(self) -> int:
        """Keys and values as wide as queries; in the backward pass, gradients of that size too."""
        shares = self.model.queries > self.model.keys
        return 2 * self.product * self.model.queries if self.repeats and shares else 0

    @property
    def _projected(self) -> int:
        """Bytes of an entry of a query before rotation."""
        wide = max(self.residual, self.product)
        return wide if self.model.norms_heads else self.product

    def _saved_attention(self) -> int:
        model = self.model
        kept = self._norm(model.hidden) + self._inputs(("q_proj", "k_proj", "v_proj"), model.hidden)
        if model.norms_heads:
            normed = model.queries + model.keys
            kept += FLOAT32 * (normed + normed // model.head_size)
            kept += 0 if model.frozen else self.product * (model.queries + model.keys)
        # Queries, keys, values and the result, with one log-normalizer a head.
        kept += self.product * 2 * (model.queries + model.keys) + FLOAT32 * model.heads
        # The input of the last projection is that result, unless dropout or a cast makes another.
        copied = model.dropout or self.autocast
        return kept + (self._adapter(("o_proj",), model.queries) if copied else 0)

    def _saved_mlp(self) -> int:
        model = self.model
        # Under 4 bytes a norm keeps its input as a float32 copy instead.
        kept = self.stream if self.residual == FLOAT32 else 0
        kept += self._norm(model.hidden) + self._inputs(("gate_proj", "up_proj"), model.hidden)
        kept += (3 if model.gated else 1) * self.product * model.intermediate
        if model.frozen:
            return kept + self._adapter(("down_proj",), model.intermediate)
        return kept + self.product * model.intermediate

    def _norm(self, width: int) -> int:
        """An RMS norm: its input if that had to be cast, its scale, what its weight multiplies."""
        copy = 0 if self.residual == FLOAT32 else FLOAT32 * width
        return copy + FLOAT32 + (0 if self.model.frozen else self.residual * width)

    def _inputs(self, names: tuple[str, ...], width: int) -> int:
        """What linear layers that read the same tensor keep of it: each its own cast of it."""
        if self.model.frozen:
            return self._adapter(names, width)
        return self.product * width * (len(names) if self.autocast else 1)

    def _adapter(self, names: tuple[str, ...], width: int) -> int:
        """What the adapters of linear layers keep of their input."""
        count = len(self.model.adapted.intersection(names))
        if self.model.dropout:
            mask = self.residual if self.on_cpu else 1
            return count * (self.product + mask) * width
        return self.product * width * (count if self.autocast else min(count, 1))
