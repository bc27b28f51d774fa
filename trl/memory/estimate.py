"""How many bytes each phase of a training step holds, by arithmetic alone.

Each phase is the largest of the moments that can be its peak; the terms say what lives at that
moment. The layer is that of Llama and its descendants: norm, attention, residual, norm, gated MLP,
residual. Sizes of tiles, passes and caches are those of the modules that make them. What the ranks
divide among themselves is counted by `Shares`. Small terms are left out: the aim is 10 %.
"""

from dataclasses import replace
from functools import cached_property
from itertools import accumulate

from ..models.packed_layout import PREFILL_TOKENS
from ..ops.linear_logprobs import CHUNK_ON_ACCELERATOR, CHUNK_ON_CPU, tile_shape
from ..ops.logprobs import BLOCK_ELEMENTS
from .model_size import FLOAT32, ModelSize
from .settings import RunSettings
from .shares import Parts, Shares

SAMPLING = 2 * FLOAT32 + 2 * 8  # logits, log-probabilities; probabilities, running sum in float64


class Layer:
    """What a token costs in one decoder layer, in bytes."""

    def __init__(self, model: ModelSize, run: RunSettings):
        product, hidden = run.product_bytes, model.hidden
        every = run.sharding.per_row * model.keys  # of the ranks that divide a row
        factors = (2 if model.gated else 1) * product * model.intermediate  # of the MLP
        self.stream = run.weight_bytes * hidden  # what a checkpoint keeps of the layer
        # Keys and values. Without sharing, rotation leaves keys as wide as the stream.
        wide = product if run.shared_prefix else max(run.weight_bytes, product)
        self.cache = (wide + product) * model.keys
        # Where ranks divide rows: keys and values as they came, and in the order of the row.
        gathered = 3 * product * every if run.sharding.per_row > 1 else 0
        # The largest working set of a forward without gradient: the result of attention, its norm
        # and the input; factors of the MLP, their product.
        working = 3 * self.stream + factors + product * model.intermediate
        self.inference = max(working, 2 * self.stream + gathered)
        # That of the backward pass: gradients of the result, and of the factors of the MLP.
        cast = product * hidden if run.autocast else 0
        self.backward = self.stream + max(factors + cast, gathered)
        # What autograd keeps for it: inputs of both norms, as float32; queries, keys, values and
        # the result of attention; what the MLP multiplies.
        self.saved_by_mlp = factors + (product * model.intermediate if model.gated else 0)
        self.saved = 2 * FLOAT32 * hidden + 2 * product * (model.queries + every)
        self.saved += self.saved_by_mlp + self._saved_by_weights(model, run)

    def _saved_by_weights(self, model: ModelSize, run: RunSettings) -> int:
        """What norms of heads keep, and what weights that are trained, or their adapters, do."""
        product, hidden = run.product_bytes, model.hidden
        heads = model.queries + model.keys if model.norms_heads else 0
        if model.frozen:  # inputs of adapted linear layers, and masks of dropout
            widths = {"o_proj": model.queries, "down_proj": model.intermediate}
            mask = run.weight_bytes if run.on_cpu else 1
            entry = product + mask if model.dropout else product
            return FLOAT32 * heads + entry * sum(widths.get(x, hidden) for x in model.adapted)
        # What all norms multiply; inputs of linear layers, each with a cast of its own.
        casts = 5 if run.autocast else 2
        inputs = product * (heads + casts * hidden + model.intermediate)
        return FLOAT32 * heads + 2 * self.stream + inputs


class Head:
    """Bytes of the output projection and log-probabilities; logits in tiles, or whole (chunk 0)."""

    def __init__(self, model: ModelSize, run: RunSettings):
        self._model, self._run, product = model, run, run.product_bytes
        self._default = CHUNK_ON_CPU if run.on_cpu else CHUNK_ON_ACCELERATOR
        self._chunk = self._default if run.logits_chunk is None else run.logits_chunk
        self._narrow = product if product < FLOAT32 else 0  # products widened to float32
        self._cast = product if run.autocast else 0
        self.whole_cast = self._cast * model.head  # made by autocast when the module is called
        self.gradient = 0 if model.frozen else run.weight_bytes * model.head
        # That of a whole weight is added in place, tile by tile, to one that is there.
        in_place = run.accumulation > 1 and not run.sharding.stage and self._chunk
        self.new_gradient = 0 if in_place else self.gradient

    def forward(self, tokens: int) -> float:
        """Bytes of a forward pass over tokens that predict: their hidden states and logits."""
        if self._chunk:
            # Products become float32 next to the logits of the tile before.
            return self._hidden(tokens) + self._tile(tokens)
        logits = tokens * self._model.vocabulary
        return self._all_logits(tokens, max(self._run.product_bytes * logits, _blocks(logits)))

    def backward(self, tokens: int) -> float:
        """Bytes of the backward pass, including a newly allocated gradient of the weight."""
        if not self._chunk:
            logits = tokens * self._model.vocabulary
            # Their gradient, made in blocks; then those of the products and of the weight.
            made = FLOAT32 * logits + _blocks(logits)
            return self._all_logits(tokens, max(made, self._narrow * logits + self.gradient))
        shape = self._tile_shape(tokens)
        # A gradient in float32 is added to as it is, any other by way of sums for a tile.
        has_sums = not self._model.frozen and self._run.weight_bytes < FLOAT32
        sums = FLOAT32 * (tokens + (shape[1] if has_sums else 0)) * self._model.hidden
        return self._hidden(tokens) + self.new_gradient + sums + self._tile(tokens)

    def sampling(self, rows: int) -> float:
        """Bytes needed to draw one token for each of a number of rows."""
        if self._run.shared_prefix:  # some rows at a time
            rows = min(rows, max(1, (self._chunk or self._default) // self._model.vocabulary))
        return rows * self._model.vocabulary * SAMPLING

    def _hidden(self, tokens: int) -> float:
        return self._run.weight_bytes * tokens * self._model.hidden

    def _all_logits(self, tokens: int, working: float) -> float:
        logits = FLOAT32 * tokens * self._model.vocabulary
        return self._hidden(tokens) + self.whole_cast + logits + working

    def _tile_shape(self, tokens: int) -> tuple[int, int]:
        rows, entries = tile_shape(self._chunk, tokens)
        return min(rows, tokens), min(entries, self._model.vocabulary)

    def _tile(self, tokens: int) -> float:
        """Two float32 tensors of a tile, and casts of hidden states and of the weight's rows."""
        rows, entries = self._tile_shape(tokens)
        logits = rows * entries * (2 * FLOAT32 + self._narrow)
        return logits + self._cast * (tokens + entries) * self._model.hidden


def _blocks(logits: int) -> int:
    return 2 * FLOAT32 * min(logits, BLOCK_ELEMENTS)


class Estimate:
    """The memory of a run."""

    def __init__(self, model: ModelSize, run: RunSettings):
        self.model, self.run = model, run
        self.shares, self.layer, self.head = Shares(model, run), Layer(model, run), Head(model, run)
        # Gradients that are there already when the next round of an update is generated.
        several = run.accumulation > run.slices * run.passes
        self._waiting = self.shares.waiting if several else 0.0
        # Copies of the layers' weights that autocast keeps until a forward ends, if they train.
        casts = run.autocast and not model.frozen
        self._casts = run.product_bytes * model.layer_matrices if casts else 0.0
        # A classifier reads the last token of each row.
        read = run.micro_batch * (run.completion if model.vocabulary else 1)
        self._read = -(-read // run.sharding.per_row)

    @cached_property
    def phases(self) -> dict[str, Parts]:
        """What is held at the peak of each phase; phases that do not happen are left out."""
        found = {"generation": self._generation()} if self.run.generates else {}
        if self.run.reference or self.run.scores_policy:
            found["scoring"] = self._scoring()
        found["forward + backward"] = self._training()
        found["optimizer"] = self.shares.held(self.shares.gradients, buffers=self.shares.update)
        return found

    @property
    def totals(self) -> dict[str, float]:
        return {name: parts.total for name, parts in self.phases.items()}

    @property
    def peak(self) -> float:
        return max(self.totals.values())

    def _generation(self) -> Parts:
        run, shares = self.run, self.shares
        if run.engine_bytes is not None:
            sent = shares.held(self._waiting, shares.layerwise)  # weights reach it one at a time
            return replace(sent, vllm=run.engine_bytes)
        rows, prompts = self.in_flight()
        token = self.layer.cache * self.model.layers
        cache, written = token * prompts * run.prompt, token * rows * run.completion
        # Keys or values of one layer are held twice while they move to a larger buffer.
        moved = (written if run.shared_prefix else cache + written) / (2 * self.model.layers)
        together = prompts * run.prompt
        if run.shared_prefix:
            together = min(together, max(run.prompt, PREFILL_TOKENS))
        inference = self.layer.inference + self.layer.stream
        held = shares.held(self._waiting, shares.whole if run.gathers else shares.layerwise)
        held = held.plus(activations=self._casts + self.head.whole_cast, kv_cache=cache)
        return _largest(
            held.plus(activations=inference * together),
            held.plus(kv_cache=written + moved, activations=inference * rows),
            held.plus(kv_cache=written, head=self.head.sampling(rows)),
        )

    def in_flight(self) -> tuple[int, int]:
        """Rows that decode together, and copies of prompts that they read."""
        run = self.run
        rows = min(run.rows, run.generation_rows or run.rows)
        if run.generation_kv_gb is not None:
            # The bound is kept as if keys and values had the precision of the weights.
            token = 2 * run.weight_bytes * self.model.keys * self.model.layers
            prompt = run.prompt / run.group_size if run.shared_prefix else run.prompt
            most = run.generation_kv_gb * 1e9 / token / (run.completion + prompt)
            rows = max(1, min(rows, int(most)))
        return rows, min(rows, run.groups(rows)) if run.shared_prefix else rows

    def _scoring(self) -> Parts:
        passes = self.run.forward_passes(cuts=True)
        held = self.shares.held(self._waiting, self.shares.layerwise).plus(activations=self._casts)
        hidden = self.layer.stream * sum(passes)
        body = hidden + self.layer.inference * max(passes) + self._kept_keys(passes)
        head = max(self.head.whole_cast, self.head.forward(self._read))
        return _largest(held.plus(activations=body), held.plus(activations=hidden, head=head))

    def _kept_keys(self, passes: list[int]) -> float:
        """Keys and values that the first of several passes keeps for the others."""
        return self.layer.cache * self.model.layers * passes[0] if len(passes) > 1 else 0.0

    def _training(self) -> Parts:
        run, shares, layers = self.run, self.shares, self.model.layers
        checkpoints = run.gradient_checkpointing
        passes = run.forward_passes(cuts=checkpoints)
        models = [self.model, *filter(None, [run.value_model])]
        kinds = [Layer(model, run) for model in models]
        held_by_layer = [x.stream if checkpoints else x.saved for x in kinds]
        of_layer, again = held_by_layer[0], self.layer.backward
        again += self.layer.saved if checkpoints else 0
        casts = self._casts / layers if checkpoints else self._casts
        keys = casts + 2 * self._kept_keys(passes)  # and their gradients
        counts = zip(models, held_by_layer, strict=True)
        kept = keys + sum(passes) * sum(model.layers * each for model, each in counts)
        kept -= run.unread * kinds[0].saved_by_mlp
        # Shares of gradients fill up while the first micro-batch runs already.
        before = shares.gradients if run.sharding.stage else 0.0
        before = shares.waiting if run.accumulation > 1 else before
        held = shares.held(before, shares.training, shares.first_buckets)
        # Behind the last layer: its result, and what the last norm keeps.
        result = kept + 3 * self.layer.stream * sum(passes)
        # Backward goes through the passes from the last to the first, which frees them.
        working = max(
            (of_layer + again) * count + layers * of_layer * earlier
            for count, earlier in zip(passes, accumulate(passes, initial=0), strict=False)
        )
        gradients = self._new_gradients(is_cut=len(passes) > 1)
        return _largest(
            held.plus(activations=result, head=self.head.backward(self._read)),
            held.plus(activations=kept + again * max(passes), gradients=self.head.new_gradient),
            held.plus(activations=working + keys, gradients=gradients),
        )

    def _new_gradients(self, is_cut: bool) -> float:
        """Gradients beside those held, when the backward pass reaches the first layer."""
        if self.run.sharding.stage:
            return self.shares.in_flight
        if self.run.accumulation == 1:
            return self.shares.whole_gradients
        # Those of several passes are summed apart, the ends excepted.
        of_layers = self.shares.trained * self.model.layer_matrices
        return min(of_layers, self.shares.whole_gradients) if is_cut else 0.0


def _largest(*moments: Parts) -> Parts:
    return max(moments, key=lambda parts: parts.total)
