"""Estimate the bytes of each phase of a training step, by arithmetic alone.

A phase has several moments that can be its peak; its estimate is the largest. The terms of a moment
say what is in memory then. The layer is that of Llama-like models: norm, attention, residual, norm,
gated MLP, residual. Sizes of tiles, passes and caches come from the modules that allocate them.
`RankMemory` counts what ranks shard. Small terms are left out: the aim is an error of 10 %.
"""

from dataclasses import replace
from functools import cached_property
from itertools import accumulate

from ..models.packed_layout import PREFILL_TOKENS
from ..ops.linear_logprobs import CHUNK_ON_ACCELERATOR, CHUNK_ON_CPU, tile_shape
from ..ops.logprobs import BLOCK_ELEMENTS
from .model_size import FLOAT32, ModelSize
from .rank_memory import MemoryUse, RankMemory
from .settings import RunSettings

# Bytes per logit: logits and log-probabilities; probabilities and their running sum in float64.
SAMPLING = 2 * FLOAT32 + 2 * 8


class Layer:
    """Bytes of a token in one decoder layer."""

    def __init__(self, model: ModelSize, run: RunSettings):
        product = run.product_bytes
        hidden = model.hidden
        all_keys = run.sharding.per_row * model.keys  # of all ranks that divide a row
        mlp_factors = (2 if model.gated else 1) * product * model.intermediate
        self.stream = run.weight_bytes * hidden  # the layer's input, which checkpointing saves
        # Keys and values. Without shared prompts, rotation leaves keys as wide as the stream.
        key = product if run.shared_prefix else max(run.weight_bytes, product)
        self.cache = (key + product) * model.keys
        # With context parallelism: keys and values as gathered, and in the order of the row.
        gathered = 3 * product * all_keys if run.sharding.per_row > 1 else 0
        # The largest working set of a forward without gradient: output of attention, its norm and
        # the input; factors of the MLP and their product.
        working = 3 * self.stream + mlp_factors + product * model.intermediate
        self.inference = max(working, 2 * self.stream + gathered)
        # That of the backward pass: gradients of the output, and of the factors of the MLP.
        cast = product * hidden if run.autocast else 0
        self.backward = self.stream + max(mlp_factors + cast, gathered)
        # What autograd saves: inputs of both norms, in float32; queries, keys, values and output of
        # attention; inputs of the MLP's products.
        self.saved_by_mlp = mlp_factors + (product * model.intermediate if model.gated else 0)
        self.saved = 2 * FLOAT32 * hidden + 2 * product * (model.queries + all_keys)
        self.saved += self.saved_by_mlp + self._saved_by_weights(model, run)

    def _saved_by_weights(self, model: ModelSize, run: RunSettings) -> int:
        """What autograd saves for norms of heads, and for trained weights or their adapters."""
        product = run.product_bytes
        hidden = model.hidden
        heads = model.queries + model.keys if model.norms_heads else 0
        if model.frozen:  # inputs of adapted linear layers, and dropout masks
            widths = {"o_proj": model.queries, "down_proj": model.intermediate}
            mask = run.weight_bytes if run.on_cpu else 1
            entry = product + mask if model.dropout else product
            return FLOAT32 * heads + entry * sum(widths.get(x, hidden) for x in model.adapted)
        # Normalized inputs of all norms; inputs of linear layers, each with its own cast.
        casts = 5 if run.autocast else 2
        inputs = product * (heads + casts * hidden + model.intermediate)
        return FLOAT32 * heads + 2 * self.stream + inputs


class Head:
    """Bytes of output projection and log-probabilities; a chunk of 0 means all logits at once."""

    def __init__(self, model: ModelSize, run: RunSettings):
        self._model = model
        self._run = run
        self._default_chunk = CHUNK_ON_CPU if run.on_cpu else CHUNK_ON_ACCELERATOR
        self._chunk = self._default_chunk if run.logits_chunk is None else run.logits_chunk
        # Of a half-precision product, which exists beside the float32 logits made of it.
        self._half_product = run.product_bytes if run.product_bytes < FLOAT32 else 0
        self._cast = run.product_bytes if run.autocast else 0
        self.whole_cast = self._cast * model.head  # by autocast, if the module is called
        self.gradient = 0 if model.frozen else run.weight_bytes * model.head
        # The gradient of a whole weight is added in place to an existing one, tile by tile.
        in_place = run.accumulation > 1 and not run.sharding.stage and self._chunk
        self.new_gradient = 0 if in_place else self.gradient

    def forward(self, tokens: int) -> float:
        """Bytes of a forward pass over tokens that predict: their hidden states and logits."""
        if self._chunk:
            # Products become float32 beside the logits of the tile before.
            return self._hidden(tokens) + self._tile(tokens)
        logits = tokens * self._model.vocabulary
        return self._all_logits(tokens, max(self._run.product_bytes * logits, _blocks(logits)))

    def backward(self, tokens: int) -> float:
        """Bytes of the backward pass, including a newly allocated gradient of the weight."""
        if not self._chunk:
            logits = tokens * self._model.vocabulary
            # The gradient of the logits, computed in blocks; then those of products and weight.
            grad_logits = FLOAT32 * logits + _blocks(logits)
            grad_products = self._half_product * logits + self.gradient
            return self._all_logits(tokens, max(grad_logits, grad_products))
        _, entries = self._tile_shape(tokens)
        # A float32 gradient is added to directly, any other through the float32 sum of a tile.
        has_sums = not self._model.frozen and self._run.weight_bytes < FLOAT32
        sums = FLOAT32 * (tokens + (entries if has_sums else 0)) * self._model.hidden
        return self._hidden(tokens) + self.new_gradient + sums + self._tile(tokens)

    def sampling(self, rows: int) -> float:
        """Bytes needed to sample one token for each of a number of rows."""
        if self._run.shared_prefix:  # some rows at a time
            chunk = self._chunk or self._default_chunk
            rows = min(rows, max(1, chunk // self._model.vocabulary))
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
        logits = rows * entries * (2 * FLOAT32 + self._half_product)
        return logits + self._cast * (tokens + entries) * self._model.hidden


def _blocks(logits: int) -> int:
    return 2 * FLOAT32 * min(logits, BLOCK_ELEMENTS)


class Estimate:
    """The estimated memory of a run on one rank."""

    def __init__(self, model: ModelSize, run: RunSettings):
        self.model = model
        self.run = run
        self.rank = RankMemory(model, run)
        self.layer = Layer(model, run)
        self.head = Head(model, run)
        # Gradients that exist already when the next rollout batch of an update is generated.
        has_several_batches = run.accumulation > run.slices * run.passes
        self._waiting = self.rank.waiting if has_several_batches else 0.0
        # Copies of the layers' weights that autocast caches until a forward ends, if they train.
        has_casts = run.autocast and not model.frozen
        self._casts = run.product_bytes * model.layer_matrices if has_casts else 0.0
        # Tokens that the head reads: of a classifier, the last of each row.
        read_tokens = run.micro_batch * (run.completion if model.vocabulary else 1)
        self._read_tokens = -(-read_tokens // run.sharding.per_row)

    @cached_property
    def phases(self) -> dict[str, MemoryUse]:
        """Memory use at the peak of each phase that the run has."""
        phases = {"generation": self._generation()} if self.run.generates else {}
        if self.run.reference or self.run.scores_policy:
            phases["scoring"] = self._scoring()
        phases["forward + backward"] = self._training()
        phases["optimizer"] = self.rank.resident(self.rank.gradients, buffers=self.rank.update)
        return phases

    @property
    def totals(self) -> dict[str, float]:
        return {name: use.total for name, use in self.phases.items()}

    @property
    def peak(self) -> float:
        return max(self.totals.values())

    def _generation(self) -> MemoryUse:
        run = self.run
        rank = self.rank
        if run.engine_bytes is not None:
            # Weights are sent to the engine one at a time.
            sending = rank.resident(self._waiting, rank.layerwise)
            return replace(sending, vllm=run.engine_bytes)
        rows, prompts = self.in_flight()
        token = self.layer.cache * self.model.layers
        prompt_cache = token * prompts * run.prompt
        completion_cache = token * rows * run.completion
        # Keys or values of one layer exist twice while they are copied to a larger buffer.
        growing = completion_cache if run.shared_prefix else prompt_cache + completion_cache
        copied = growing / (2 * self.model.layers)
        prefill_tokens = prompts * run.prompt
        if run.shared_prefix:
            prefill_tokens = min(prefill_tokens, max(run.prompt, PREFILL_TOKENS))
        inference = self.layer.inference + self.layer.stream
        base = rank.resident(self._waiting, rank.whole if run.gathers else rank.layerwise)
        base = base.plus(activations=self._casts + self.head.whole_cast, kv_cache=prompt_cache)
        return _largest(
            base.plus(activations=inference * prefill_tokens),
            base.plus(kv_cache=completion_cache + copied, activations=inference * rows),
            base.plus(kv_cache=completion_cache, head=self.head.sampling(rows)),
        )

    def in_flight(self) -> tuple[int, int]:
        """Return the rows that decode together, and the copies of prompts that they read."""
        run = self.run
        rows = min(run.rows, run.generation_rows or run.rows)
        if run.generation_kv_gb is not None:
            # Generation applies the bound as if keys and values had the dtype of the weights.
            token = 2 * run.weight_bytes * self.model.keys * self.model.layers
            prompt = run.prompt / run.group_size if run.shared_prefix else run.prompt
            max_rows = run.generation_kv_gb * 1e9 / token / (run.completion + prompt)
            rows = max(1, min(rows, int(max_rows)))
        return rows, min(rows, run.groups(rows)) if run.shared_prefix else rows

    def _scoring(self) -> MemoryUse:
        passes = self.run.forward_passes(cuts=True)
        base = self.rank.resident(self._waiting, self.rank.layerwise)
        base = base.plus(activations=self._casts)
        hidden = self.layer.stream * sum(passes)
        body = hidden + self.layer.inference * max(passes) + self._cached_keys(passes)
        head = max(self.head.whole_cast, self.head.forward(self._read_tokens))
        return _largest(base.plus(activations=body), base.plus(activations=hidden, head=head))

    def _cached_keys(self, passes: list[int]) -> float:
        """Keys and values that the first of several passes caches for the others."""
        return self.layer.cache * self.model.layers * passes[0] if len(passes) > 1 else 0.0

    def _training(self) -> MemoryUse:
        run = self.run
        rank = self.rank
        layers = self.model.layers
        checkpoints = run.gradient_checkpointing
        passes = run.forward_passes(cuts=checkpoints)
        saved_by_layer = self.layer.stream if checkpoints else self.layer.saved
        # The working set of a layer in the backward pass, recomputed activations included.
        layer_backward = self.layer.backward + (self.layer.saved if checkpoints else 0)
        saved = layers * saved_by_layer
        if run.value_model is not None:
            value_layer = Layer(run.value_model, run)
            saved_by_value_layer = value_layer.stream if checkpoints else value_layer.saved
            saved += run.value_model.layers * saved_by_value_layer
        casts = self._casts / layers if checkpoints else self._casts
        keys_and_casts = casts + 2 * self._cached_keys(passes)  # keys, and their gradients
        activations = keys_and_casts + sum(passes) * saved
        activations -= run.unread * self.layer.saved_by_mlp
        # Sharded gradients are already allocated while the first micro-batch runs.
        gradients = rank.gradients if run.sharding.stage else 0.0
        if run.accumulation > 1:
            gradients = rank.waiting
        base = rank.resident(gradients, rank.training, rank.first_buckets)
        # After the last layer: its output, and what the last norm saves.
        with_output = activations + 3 * self.layer.stream * sum(passes)
        # Backward goes through the passes from the last to the first, and frees each.
        at_first_layer = max(
            (saved_by_layer + layer_backward) * tokens + layers * saved_by_layer * earlier
            for tokens, earlier in zip(passes, accumulate(passes, initial=0), strict=False)
        )
        new_gradients = self._new_gradients(has_passes=len(passes) > 1)
        return _largest(
            base.plus(activations=with_output, head=self.head.backward(self._read_tokens)),
            base.plus(
                activations=activations + layer_backward * max(passes),
                gradients=self.head.new_gradient,
            ),
            base.plus(activations=at_first_layer + keys_and_casts, gradients=new_gradients),
        )

    def _new_gradients(self, has_passes: bool) -> float:
        """Gradients beside the resident ones, when the backward pass reaches the first layer."""
        if self.run.sharding.stage:
            return self.rank.in_flight
        if self.run.accumulation == 1:
            return self.rank.whole_gradients
        if not has_passes:
            return 0.0
        # Autograd sums the gradients of several passes apart, except those of embedding and head.
        return min(self.rank.trained * self.model.layer_matrices, self.rank.whole_gradients)


def _largest(*moments: MemoryUse) -> MemoryUse:
    return max(moments, key=lambda use: use.total)
