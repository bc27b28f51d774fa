"""Bytes of weights, gradients and optimizer states that one rank holds.

Terms follow the allocations of DeepSpeed's `stage_1_and_2.py` and `stage3.py` and of torch's FSDP.
"""

from dataclasses import dataclass
from typing import Self

from .model_size import FLOAT32, ModelSize, state_bytes
from .settings import GRADIENTS, OPTIMIZER, WEIGHTS, RunSettings


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use at one moment, by purpose."""

    weights: float = 0.0
    reference: float = 0.0
    gathered: float = 0.0
    gradients: float = 0.0
    buffers: float = 0.0
    optimizer: float = 0.0
    vllm: float = 0.0
    kv_cache: float = 0.0
    head: float = 0.0
    activations: float = 0.0

    def by_purpose(self) -> dict[str, float]:
        """Return the bytes of each purpose by name."""
        return dict(vars(self))

    @property
    def total(self) -> float:
        return sum(self.by_purpose().values())

    def plus(self, **more: float) -> Self:
        """Return the sum of this and more bytes, by purpose."""
        sums = self.by_purpose()
        for name, size in more.items():
            sums[name] += size
        return type(self)(**sums)


class RankMemory:
    """Memory of one rank for the models of a run; all figures are bytes."""

    def __init__(self, model: ModelSize, run: RunSettings):
        self.model = model
        self.run = run
        self.sharding = run.sharding
        self._value_models = [] if run.value_model is None else [run.value_model]
        self._models = [model, *self._value_models]
        self._trainable = sum(size.trainable for size in self._models)  # entries
        # FSDP alone keeps weights in the dtype they were loaded in; DeepSpeed casts all of them.
        loaded = run.loaded_bytes if run.sharding.is_fsdp else None
        # Bytes of a frozen weight.
        self._frozen = loaded or run.weight_bytes
        # Bytes of a trained weight as it is stored: FSDP keeps float32 under mixed precision.
        is_float32 = loaded or (model.frozen and not run.sharding.is_zero)
        self.stored = FLOAT32 if is_float32 else run.weight_bytes
        # Bytes of an entry of a gradient in the backward pass, and of all gradients.
        self.trained = self._gradient_bytes()
        self.whole_gradients = self.trained * self._trainable

    def _gradient_bytes(self) -> float:
        """Bytes of an entry of a gradient: adapters train in float32 unless they are cast."""
        is_cast = self.run.sharding.stage and self.run.loaded_bytes
        return FLOAT32 if self.model.frozen and not is_cast else self.run.weight_bytes

    def resident(
        self, gradients: float = 0.0, gathered: float = 0.0, buffers: float = 0.0
    ) -> MemoryUse:
        """Return what is on the device outside of a forward; engines may hold more gradients."""
        sharding = self.sharding
        # ZeRO-3 allocates gradients at the start; FSDP1 frees them when it needs new ones.
        is_zero3 = sharding.is_zero and sharding.divides_weights
        allocated = self.gradients if is_zero3 or sharding.engine == "fsdp1" else 0.0
        return MemoryUse(
            weights=0.0 if sharding.offloads_weights else self.weights,
            reference=0.0 if sharding.offloads_weights else self.reference,
            gathered=gathered,
            gradients=max(gradients, allocated),
            buffers=buffers + (self._bucket if is_zero3 else 0.0),
            optimizer=0.0 if sharding.offloads_optimizer else self.optimizer,
            vllm=0.0 if self.run.engine_sleeps else self.run.engine_bytes or 0.0,
        )

    @property
    def host(self) -> float:
        """What a rank holds in the memory of its host."""
        sharding = self.sharding
        weights = self.weights + self.reference if sharding.offloads_weights else 0.0
        if not sharding.offloads_optimizer:
            return weights
        # Gradients are there, too; up to ZeRO-2, also the updated weights for the device.
        gradient = self.stored if sharding.is_fsdp else FLOAT32
        updated = self.run.weight_bytes if sharding.is_zero and sharding.stage < WEIGHTS else 0
        entries = sharding.fraction(OPTIMIZER) * self._trainable
        return weights + self.optimizer + (gradient + updated) * entries

    @property
    def weights(self) -> float:
        """Weights that a rank holds, adapter and value model included."""
        model = self.model
        run = self.run
        fraction = self.sharding.fraction(WEIGHTS)
        entry = self._frozen if model.frozen else self.stored
        base = entry * (model.parameters - model.adapter - model.layer_matrices) * fraction
        if run.matrix_bytes is None:
            base += entry * model.layer_matrices * fraction
        else:  # quantized matrices stay whole if the engine cannot shard their storage
            quantized_fraction = fraction if run.divides_quantized else 1.0
            base += run.matrix_bytes * model.layer_matrices * quantized_fraction
        values = sum(size.parameters for size in self._value_models)
        return base + self.stored * (model.adapter + values) * fraction

    @property
    def reference(self) -> float:
        """Weights of the reference policy, which is sharded like the policy."""
        if not self.run.reference or self.model.frozen:
            return 0.0
        return self._frozen * self.model.parameters * self.sharding.fraction(WEIGHTS)

    @property
    def whole(self) -> float:
        """All weights, gathered for generation; FSDP1 gathers them as they are stored."""
        is_stored = self.sharding.engine == "fsdp1" and self.run.matrix_bytes is None
        entry = self.stored if is_stored else self.run.weight_bytes
        return self._gathered(self.model.layers, entry)

    @property
    def layerwise(self) -> float:
        """Weights gathered at once without gradient: one layer, which FSDP copies from a buffer."""
        return self._gathered(2 if self.sharding.is_fsdp else 1)

    @property
    def training(self) -> float:
        """Weights gathered at once in training, where FSDP prefetches one layer."""
        sharding = self.sharding
        parameters = self.model.parameters
        if sharding.divides_weights and (sharding.is_zero or sharding.keeps_weights):
            limit = sharding.live if sharding.is_zero else parameters
            return self.run.weight_bytes * min(parameters, limit)
        return self._gathered(3)

    def _gathered(self, layers: int, entry: int = 0) -> float:
        """Weights of some layers, and those outside the layers, which stay for a whole forward."""
        if not self.sharding.divides_weights:
            return 0.0
        model = self.model
        entry = entry or self.run.weight_bytes
        matrix_entry = entry if self.run.matrix_bytes is None else self.run.matrix_bytes
        outside = model.parameters - model.layer_matrices - model.adapter
        layer = (matrix_entry * model.layer_matrices + entry * model.adapter) / model.layers
        return entry * outside + layers * layer

    @property
    def gradients(self) -> float:
        """Gradients on the device at the update."""
        sharding = self.sharding
        if sharding.offloads_optimizer:
            return 0.0
        if not sharding.stage:
            # DDP exchanges them in buckets that together are as large as the gradients.
            return (2 if self.run.processes > 1 else 1) * self.whole_gradients
        if sharding.is_fsdp:
            return self.stored * self._trainable * sharding.fraction(GRADIENTS)
        return self.whole_gradients * sharding.fraction(OPTIMIZER)

    @property
    def waiting(self) -> float:
        """Gradients on the device between the micro-batches of an update."""
        sharding = self.sharding
        if sharding.is_zero and sharding.stage == OPTIMIZER:
            return self.whole_gradients + self._bucket
        if sharding.is_fsdp and sharding.stage and not sharding.syncs:  # sums whole gradients
            return max(self.gradients, self.whole_gradients)
        return self.gradients

    @property
    def in_flight(self) -> float:
        """Gradients in a backward pass before they are reduced: outside the layers, and a layer."""
        model = self.model
        if model.frozen:
            return self.whole_gradients / model.layers
        outside = model.parameters - model.layer_matrices
        # A layer counts twice, with the buffer in which it is reduced.
        return self.trained * (outside + 2 * model.layer_matrices / model.layers)

    @property
    def _bucket(self) -> float:
        """The buffers in which DeepSpeed reduces gradients."""
        sharding = self.sharding
        return self.trained * sharding.bucket if sharding.is_zero and sharding.stage else 0.0

    @property
    def first_buckets(self) -> float:
        """The reduce buffers of the first backward pass: of ZeRO-2, and of ZeRO-1 if it is alone.

        With several micro-batches, those of ZeRO-1 are already in `waiting`.
        """
        is_waiting = self.sharding.stage == OPTIMIZER and self.run.accumulation > 1
        return 0.0 if is_waiting or self.sharding.divides_weights else self._bucket

    @property
    def optimizer(self) -> float:
        """Optimizer states, with DeepSpeed also the float32 weights that it updates."""
        run = self.run
        is_zero = self.sharding.is_zero
        entry = FLOAT32 if is_zero else self.stored
        states = sum(
            state_bytes(run.optimizer, run.optimizer_args, model, entry) for model in self._models
        )
        master_weights = FLOAT32 * self._trainable if is_zero else 0.0
        return (states + master_weights) * self.sharding.fraction(OPTIMIZER)

    @property
    def update(self) -> float:
        """What the update itself needs: DeepSpeed's float32 copy of the gradients."""
        sharding = self.sharding
        if not sharding.is_zero or sharding.offloads_optimizer:
            return 0.0
        entries = self._trainable * sharding.fraction(OPTIMIZER)
        return FLOAT32 * (min(entries, sharding.sub_group) if sharding.divides_weights else entries)
