"""How many bytes each phase of a training step holds, by arithmetic alone.

Each phase is the largest of the moments that can be its peak; the terms say what lives at that
moment. What the ranks divide among themselves is counted by `Shares`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from .generating import Generation
from .head import Head
from .layer import FLOAT32, Layer
from .model_size import ModelSize
from .settings import Forward, Parts, RunSettings, largest
from .shares import Shares

PHASES = ("generation", "scoring", "forward + backward", "optimizer")


class Estimate:
    """The memory of a run.

    Args:
        model (`ModelSize`): what is trained.
        run (`RunSettings`): how.
    """

    def __init__(self, model: ModelSize, run: RunSettings):
        self.model = model
        self.run = run
        self.shares = Shares(model, run)
        repeats = run.shared_prefix and not run.on_cpu
        self.layer = Layer(model, run.weight_bytes, run.product_bytes, run.on_cpu, repeats)
        self.head = Head(model, run.weight_bytes, run.product_bytes, run.logits_chunk, run.on_cpu)

    @cached_property
    def phases(self) -> dict[str, Parts]:
        """What is held at the peak of each phase; phases that do not happen are left out."""
        found = {"generation": self._generation()}
        if self.run.reference or self.run.scores_policy:
            found["scoring"] = self._scoring()
        found["forward + backward"] = self._training()
        found["optimizer"] = self._held(self.shares.gradients, buffers=self.shares.update)
        return found

    @property
    def peak(self) -> float:
        """Bytes of the largest phase."""
        return max(parts.total for parts in self.phases.values())

    # --- What is always held ---

    def _held(self, gradients: float = 0.0, gathered: float = 0.0, buffers: float = 0.0) -> Parts:
        held = self.shares.held(gradients, gathered, buffers)
        asleep = self.run.engine_sleeps or self.run.engine_bytes is None
        return held if asleep else held.plus(vllm=self.run.engine_bytes or 0.0)

    @property
    def _waiting(self) -> float:
        """Gradients that are there already when the next round of an update is generated."""
        several = self.run.accumulation > self.run.slices * self.run.passes
        return self.shares.waiting if several else 0.0

    @property
    def _largest_cast(self) -> float:
        """The copy that autocast makes of one weight for its product."""
        return self.run.product_bytes * self.model.largest_matrix if self.run.autocast else 0.0

    @property
    def _all_casts(self) -> float:
        return self.run.product_bytes * self.model.layer_matrices if self.run.autocast else 0.0

    @property
    def _cached_casts(self) -> float:
        """Copies of weights that autocast keeps until a forward ends: those of trained ones."""
        return self._largest_cast if self.model.frozen else self._all_casts

    @property
    def _saved_casts(self) -> float:
        """Copies of weights that the graph of a forward keeps; a quantized weight has none."""
        return self._all_casts if self.run.matrix_bytes is None else self._largest_cast

    # --- Phases ---

    def _generation(self) -> Parts:
        shares = self.shares
        if self.run.engine_bytes is not None:
            sent = self._held(self._waiting, shares.largest)  # weights reach it one at a time
            return replace(sent, vllm=self.run.engine_bytes)
        gathered = shares.whole if self.run.gathers else shares.layerwise
        held = self._held(self._waiting, gathered)
        casts = self._cached_casts + self.head.whole_cast
        moments = Generation(self.model, self.run, self.layer, self.head).moments()
        return largest(
            [
                held.plus(kv_cache=cache, head=head, activations=casts + working)
                for cache, head, working in moments
            ]
        )

    def _scoring(self) -> Parts:
        run, layer = self.run, self.layer
        forward = run.forward(run.micro_batch, cuts=True)
        casts = self._cached_casts if run.scores_policy else self._largest_cast
        held = self._held(self._waiting, self.shares.layerwise).plus(activations=casts)
        hidden = layer.stream * forward.tokens
        end = held.plus(activations=hidden, head=self.head.whole_cast)
        body = held.plus(activations=self._inference(forward) + self._kept_keys(forward))
        # The hidden states of all tokens are held next to those that predict.
        predicted = self.head.forward(run.micro_batch * run.completion)
        head = held.plus(activations=hidden, head=predicted)
        return largest([body, end, head])

    def _inference(self, forward: Forward) -> float:
        """The working set of the largest pass of a forward, above what earlier ones left."""
        layer, done, sizes = self.layer, 0, []
        for tokens, tails in forward.passes:
            sizes.append(layer.stream * done + layer.once * tokens + layer.inference(tokens, tails))
            done += tokens
        return max(sizes)

    def _kept_keys(self, forward: Forward) -> float:
        return self.layer.keys_and_values(shared=True) * self.model.layers * forward.kept

    def _training(self) -> Parts:
        run, layer = self.run, self.layer
        forward = run.forward(run.micro_batch, cuts=run.gradient_checkpointing)
        shares = self.shares
        # Shares of gradients fill up while the first micro-batch runs already.
        before = shares.gradients if run.sharding.stage else 0.0
        before = shares.waiting if run.accumulation > 1 else before
        held = self._held(before, shares.training, shares.first_buckets)
        kept = self._kept(forward)
        end = held.plus(activations=kept + self.head.whole_cast)
        if run.gradient_checkpointing:
            end = end.plus(activations=self._cached_casts + self._inference(forward))
        at_head = held.plus(
            activations=kept + (layer.last_norm + layer.stream) * forward.tokens,
            head=self._head(run.micro_batch * run.completion),
        )
        last = self._held(max(before, shares.gradients), shares.training, shares.first_buckets)
        embedding = last.plus(gradients=self._second_embedding)
        return largest([end, at_head, *self._backward(forward, held), embedding])

    @property
    def _kept_of_layer(self) -> int:
        """Bytes a token that a layer keeps for its backward pass."""
        if self.run.gradient_checkpointing:
            return self.layer.stream
        # Under 4 bytes a norm keeps a float32 copy in place of the layer's input.
        return self.layer.saved(self.run.weight_bytes == FLOAT32)

    def _kept(self, forward: Forward) -> float:
        """Activations that a forward keeps for its backward pass."""
        casts = 0.0 if self.run.gradient_checkpointing else self._saved_casts
        each = self.model.layers * self._kept_of_layer + self.layer.rotation
        return each * forward.tokens + casts + self._kept_keys(forward)

    def _backward(self, forward: Forward, held: Parts) -> Iterator[Parts]:
        """The backward pass of each pass of a forward, at its last layer and at its first."""
        layer, layers = self.layer, self.model.layers
        casts = 0.0 if self.run.gradient_checkpointing else self._saved_casts
        earlier = 0
        for number, (tokens, tails) in enumerate(forward.passes):
            always = casts + (layers * self._kept_of_layer + layer.last_norm) * earlier
            # Kept keys and values, and their gradients; that of all hidden states, to the end.
            always += 2 * self._kept_keys(forward)
            always += layer.stream * forward.tokens if number else 0
            always += self._again(tokens, tails, forward.kept if number else 0)
            apart, own = self._gradients_apart(forward, of_tails=number > 0)
            is_first_back = number + 1 == len(forward.passes)
            yield held.plus(
                activations=always + layers * self._kept_of_layer * tokens,
                gradients=self.head.gradient if is_first_back else apart,
            )
            yield held.plus(
                activations=always + self._kept_of_layer * tokens,
                gradients=apart - own if is_first_back and apart else apart,
            )
            earlier += tokens

    def _gradients_apart(self, forward: Forward, of_tails: bool) -> tuple[float, float]:
        """Gradients beside those held, and how many of them the first layer is still to add."""
        if self.run.sharding.stage:
            return self.shares.in_flight, 0.0
        # Gradients are added to what is held when the first pass, the last to be gone back
        # through, is done; until then those of all passes are summed apart.
        own = self._layer_gradient + self._embedding
        if self.run.accumulation > 1 and not forward.is_cut:
            return 0.0, own
        return self._summed_gradients(of_tails), own

    def _summed_gradients(self, of_tails: bool) -> float:
        """Gradients of all weights; passes over tails share their casts, and sum those of casts."""
        if of_tails and self.run.autocast and not self.model.frozen:
            return self._all_casts + self.head.gradient
        return self.shares.trained * self.model.trainable

    def _again(self, tokens: int, tails: int, prefix: int) -> float:
        """What the backward pass of one layer of one pass adds."""
        # For tails apart from their prefix: gradients of its keys and values, in two buffers.
        keys = 2 * self.layer.keys_and_values(shared=True) * prefix
        needed = self.layer.backward(tokens, tails) + keys
        if self.run.gradient_checkpointing:
            return needed + self._saved_casts / self.model.layers
        return needed - self.layer.saved() * tokens

    @property
    def _layer_gradient(self) -> float:
        """Gradients of one layer but for its last projection, which comes first."""
        if self.model.frozen:
            return 0.0
        matrices = self.model.layer_matrices / self.model.layers
        return self.run.weight_bytes * (matrices - self.model.hidden * self.model.intermediate)

    @property
    def _embedding(self) -> float:
        """The gradient of an embedding of its own, which comes last."""
        return 0.0 if self.model.tied else self.head.gradient

    def _head(self, predicted: int) -> float:
        return max(self.head.forward(predicted), self.head.backward(predicted))

    @property
    def _second_embedding(self) -> float:
        """Gradients of the embedding that wait to be added: its own, and that of a tied head."""
        return self.head.gradient * (self.model.tied + (self.run.accumulation > 1))
