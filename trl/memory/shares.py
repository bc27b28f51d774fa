"""What one rank holds of weights, gradients and optimizer states, in bytes.

Terms follow what DeepSpeed's `stage_1_and_2.py` and `stage3.py` and torch's FSDP allocate.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

from .model_size import FLOAT32, ModelSize, state_bytes
from .settings import GRADIENTS, OPTIMIZER, WEIGHTS, RunSettings


@dataclass(frozen=True)
class Parts:
    """Bytes held at one moment, by what they are for."""

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

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))

    def plus(self, **more: float) -> Self:
        return replace(self, **{name: getattr(self, name) + size for name, size in more.items()})


class Shares:
    """The models of a run as one rank holds them; all figures are bytes."""

    def __init__(self, model: ModelSize, run: RunSettings):
        self.model, self.run, self.sharding = model, run, run.sharding
        self._models = [model, *filter(None, [run.value_model])]
        self._count = sum(each.trainable for each in self._models)  # entries that are trained
        # FSDP alone keeps weights as they were loaded; DeepSpeed casts all of them.
        loaded = run.loaded_bytes if run.sharding.is_fsdp else None
        self._frozen = loaded or run.weight_bytes
        # Of a trained weight where it lies: FSDP keeps float32 under mixed precision.
        wide = loaded or (model.frozen and not run.sharding.is_zero)
        self.stored = FLOAT32 if wide else run.weight_bytes
        # Of an entry of a gradient as the backward pass makes it, and of those of all weights.
        is_cast = run.sharding.stage and run.loaded_bytes
        self.trained = FLOAT32 if model.frozen and not is_cast else run.weight_bytes
        self.whole_gradients = self.trained * self._count

    def held(self, gradients: float = 0.0, gathered: float = 0.0, buffers: float = 0.0) -> Parts:
        """What is on the device outside of any forward; the engine may keep more gradients."""
        sharding, run = self.sharding, self.run
        # ZeRO-3 makes them at the start; FSDP1 forgets them when it needs new ones.
        is_third = sharding.is_zero and sharding.divides_weights
        stay = self.gradients if is_third or sharding.engine == "fsdp1" else 0.0
        return Parts(
            weights=0.0 if sharding.offloads_weights else self.weights,
            reference=0.0 if sharding.offloads_weights else self.reference,
            gathered=gathered,
            gradients=max(gradients, stay),
            buffers=buffers + (self._bucket if is_third else 0.0),
            optimizer=0.0 if sharding.offloads_optimizer else self.optimizer,
            vllm=0.0 if run.engine_sleeps else run.engine_bytes or 0.0,
        )

    @property
    def host(self) -> float:
        """What a rank keeps in the memory of its host."""
        sharding = self.sharding
        weights = self.weights + self.reference if sharding.offloads_weights else 0.0
        if not sharding.offloads_optimizer:
            return weights
        # Gradients lie there too; up to ZeRO-2, the updated weights on their way to the device.
        entry = self.stored if sharding.is_fsdp else FLOAT32
        narrow = self.run.weight_bytes if sharding.is_zero and sharding.stage < WEIGHTS else 0
        return weights + self.optimizer + (entry + narrow) * sharding.share(OPTIMIZER) * self._count

    @property
    def weights(self) -> float:
        """Weights that a rank keeps, adapter and value model included."""
        model, run, share = self.model, self.run, self.sharding.share(WEIGHTS)
        each = self._frozen if model.frozen else self.stored
        base = each * (model.parameters - model.adapter - model.layer_matrices) * share
        if run.matrix_bytes is None:
            base += each * model.layer_matrices * share
        else:  # quantized matrices stay whole where the engine cannot divide their storage
            divided = share if run.divides_quantized else 1.0
            base += run.matrix_bytes * model.layer_matrices * divided
        values = sum(each.parameters for each in self._models[1:])
        return base + self.stored * (model.adapter + values) * share

    @property
    def reference(self) -> float:
        """Weights of the reference policy, which is divided as the policy is."""
        if not self.run.reference or self.model.frozen:
            return 0.0
        return self._frozen * self.model.parameters * self.sharding.share(WEIGHTS)

    @property
    def whole(self) -> float:
        """All weights together, gathered for generation: FSDP1 gathers what it stores."""
        is_stored = self.sharding.engine == "fsdp1" and self.run.matrix_bytes is None
        each = self.stored if is_stored else self.run.weight_bytes
        return self._gathered(self.model.layers, each)

    @property
    def layerwise(self) -> float:
        """Weights gathered at once without gradient: one layer, which FSDP copies from a buffer."""
        return self._gathered(2 if self.sharding.is_fsdp else 1)

    @property
    def training(self) -> float:
        """Weights gathered at once in a training pass, in which FSDP gathers a layer ahead."""
        sharding, parameters = self.sharding, self.model.parameters
        if sharding.divides_weights and (sharding.is_zero or sharding.keeps_weights):
            most = sharding.live if sharding.is_zero else parameters
            return self.run.weight_bytes * min(parameters, most)
        return self._gathered(3)

    def _gathered(self, layers: int, each: int = 0) -> float:
        """Weights outside the layers, which stay for a whole forward, and those of some layers."""
        if not self.sharding.divides_weights:
            return 0.0
        model, each = self.model, each or self.run.weight_bytes
        matrix = each if self.run.matrix_bytes is None else self.run.matrix_bytes
        ends = model.parameters - model.layer_matrices - model.adapter
        layer = (matrix * model.layer_matrices + each * model.adapter) / model.layers
        return each * ends + layers * layer

    @property
    def gradients(self) -> float:
        """What a rank has of the gradients at the update, on the device."""
        sharding = self.sharding
        if sharding.offloads_optimizer:
            return 0.0
        if not sharding.stage:
            # Data parallelism exchanges them in buckets as large as themselves.
            return (2 if self.run.processes > 1 else 1) * self.whole_gradients
        if sharding.is_fsdp:
            return self.stored * self._count * sharding.share(GRADIENTS)
        return self.whole_gradients * sharding.share(OPTIMIZER)

    @property
    def waiting(self) -> float:
        """What a rank has of them between the micro-batches of an update."""
        sharding = self.sharding
        if sharding.is_zero and sharding.stage == OPTIMIZER:
            return self.whole_gradients + self._bucket
        if sharding.is_fsdp and sharding.stage and not sharding.syncs:  # sums whole ones
            return max(self.gradients, self.whole_gradients)
        return self.gradients

    @property
    def in_flight(self) -> float:
        """Gradients that a backward pass holds before they are divided, of the ends and a layer."""
        model = self.model
        if model.frozen:
            return self.whole_gradients / model.layers
        # And the buffer in which they are reduced.
        ends = model.parameters - model.layer_matrices
        return self.trained * (ends + 2 * model.layer_matrices / model.layers)

    @property
    def _bucket(self) -> float:
        """The buffers in which DeepSpeed reduces gradients."""
        sharding = self.sharding
        return self.trained * sharding.bucket if sharding.is_zero and sharding.stage else 0.0

    @property
    def first_buckets(self) -> float:
        """Those of a backward pass of ZeRO-1, unless they have been waiting, and of ZeRO-2."""
        waits = self.sharding.stage == OPTIMIZER and self.run.accumulation > 1
        return 0.0 if waits or self.sharding.divides_weights else self._bucket

    @property
    def optimizer(self) -> float:
        """States, and the float32 weights that DeepSpeed updates in place of the model's own."""
        run, is_zero = self.run, self.sharding.is_zero
        entry = FLOAT32 if is_zero else self.stored
        named = (run.optimizer, run.optimizer_args)
        states = sum(state_bytes(*named, model, entry) for model in self._models)
        masters = FLOAT32 * self._count if is_zero else 0.0
        return (states + masters) * self.sharding.share(OPTIMIZER)

    @property
    def update(self) -> float:
        """What the update itself needs: DeepSpeed's float32 copy of the gradients."""
        sharding = self.sharding
        if not sharding.is_zero or sharding.offloads_optimizer:
            return 0.0
        entries = self._count * sharding.share(OPTIMIZER)
        return FLOAT32 * (min(entries, sharding.sub_group) if sharding.divides_weights else entries)
