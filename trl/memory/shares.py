"""What one rank holds of weights, gradients and optimizer states, in bytes.

Terms follow what DeepSpeed's `stage_1_and_2.py` and `stage3.py` and torch's FSDP allocate; ZeRO:
Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from .model_size import FLOAT32, ModelSize, state_bytes
from .settings import RunSettings
from .sharding import GRADIENTS, OPTIMIZER, WEIGHTS


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
        """Bytes of all parts."""
        return sum(getattr(self, field.name) for field in fields(self))

    def plus(self, **more: float) -> Parts:
        """Return a copy with bytes added to some parts."""
        return replace(self, **{name: getattr(self, name) + size for name, size in more.items()})


@dataclass(frozen=True)
class Shares:
    """The model of a run as one rank holds it.

    Args:
        model (`ModelSize`): what is trained.
        run (`RunSettings`): how, and divided how.
    """

    model: ModelSize
    run: RunSettings

    def held(self, gradients: float = 0.0, gathered: float = 0.0, buffers: float = 0.0) -> Parts:
        """Bytes on the device outside of any forward.

        Args:
            gradients (`float`): bytes of the gradients that there are at this moment; more than
                that if the engine never frees its own.
            gathered (`float`): bytes of weights of other ranks that are here for now.
            buffers (`float`): bytes of buffers that this moment needs.
        """
        sharding = self.run.sharding
        # ZeRO-3 makes them at the start; FSDP1 forgets them when it needs new ones.
        is_third = sharding.is_zero and sharding.divides_weights
        stay = self.gradients if is_third or sharding.engine == "fsdp1" else 0.0
        return Parts(
            weights=0.0 if sharding.offloads_weights else self.weights,
            reference=0.0 if sharding.offloads_weights else self.reference,
            gathered=gathered,
            gradients=max(gradients, stay),
            buffers=buffers + (self.bucket if is_third else 0.0),
            optimizer=0.0 if sharding.offloads_optimizer else self.optimizer,
        )

    @property
    def host(self) -> float:
        """Bytes that a rank keeps in the memory of its host."""
        sharding = self.run.sharding
        weights = self.weights + self.reference if sharding.offloads_weights else 0.0
        if not sharding.offloads_optimizer:
            return weights
        # Gradients lie there too; up to ZeRO-2, the updated weights on their way to the device.
        entry = self.stored if sharding.is_fsdp else FLOAT32
        narrow = self.run.weight_bytes if sharding.is_zero and sharding.stage < WEIGHTS else 0
        return weights + self.optimizer + (entry + narrow) * sharding.share(OPTIMIZER) * self._count

    @property
    def _count(self) -> int:
        """Entries that are trained."""
        return self.model.trainable * self.run.trained_models

    # --- Weights ---

    @property
    def stored(self) -> int:
        """Bytes of a trained weight where it lies: FSDP keeps float32 under mixed precision."""
        if self.model.frozen and not self.run.sharding.is_zero:
            return FLOAT32
        mixed = self.run.loaded_bytes is not None
        return FLOAT32 if self.run.sharding.is_fsdp and mixed else self.run.weight_bytes

    @property
    def weights(self) -> float:
        """Weights that a rank keeps, adapter included."""
        model, run = self.model, self.run
        share = run.sharding.share(WEIGHTS)
        ends = model.parameters - model.adapter - model.layer_matrices
        each = self._frozen_bytes if model.frozen else self.stored
        matrices = (each if run.matrix_bytes is None else run.matrix_bytes) * model.layer_matrices
        # Quantized matrices stay whole where the engine cannot divide their storage.
        is_whole = run.matrix_bytes is not None and not run.divides_quantized
        base = matrices * (1.0 if is_whole else share) + each * ends * share
        return run.trained_models * (base + self.stored * model.adapter * share)

    @property
    def reference(self) -> float:
        """Weights of the reference policy, which is divided as the policy is."""
        if not self.run.reference or self.model.frozen:
            return 0.0
        return self._frozen_bytes * self.model.parameters * self.run.sharding.share(WEIGHTS)

    @property
    def _frozen_bytes(self) -> int:
        """DeepSpeed casts what it does not train too; FSDP leaves it as it was loaded."""
        loaded = self.run.loaded_bytes if self.run.sharding.is_fsdp else None
        return loaded or self.run.weight_bytes

    @property
    def whole(self) -> float:
        """Bytes of all weights together, gathered for generation from the shards."""
        run, model = self.run, self.model
        if not run.sharding.divides_weights:
            return 0.0
        if run.matrix_bytes is not None:
            ends = model.parameters - model.layer_matrices
            return run.matrix_bytes * model.layer_matrices + run.weight_bytes * ends
        # FSDP1 gathers what it stores, the others what they compute with.
        is_first = run.sharding.engine == "fsdp1"
        return (self.stored if is_first else run.weight_bytes) * model.parameters

    @property
    def layerwise(self) -> float:
        """Bytes of the weights gathered at once in a forward without gradient.

        What is outside the layers stays for the whole forward; a layer is gathered while it runs,
        by FSDP in a buffer that it is copied out of.
        """
        sharding, model = self.run.sharding, self.model
        if not sharding.divides_weights:
            return 0.0
        ends = model.parameters - model.layer_matrices - model.adapter
        return self.run.weight_bytes * ends + (2 if sharding.is_fsdp else 1) * self._layer

    @property
    def training(self) -> float:
        """Bytes of the weights gathered at once in a training pass."""
        sharding = self.run.sharding
        if not sharding.divides_weights:
            return 0.0
        if sharding.is_zero or sharding.keeps_weights:
            most = sharding.live if sharding.is_zero else self.model.parameters
            return self.run.weight_bytes * min(self.model.parameters, most)
        return self.layerwise + self._layer  # the next layer is gathered ahead

    @property
    def largest(self) -> float:
        """Bytes of the largest weight, if it has to be gathered."""
        largest = max(self.model.largest_matrix, self.model.head)
        return self.run.weight_bytes * largest if self.run.sharding.divides_weights else 0.0

    @property
    def _layer(self) -> float:
        matrix = self.run.weight_bytes if self.run.matrix_bytes is None else self.run.matrix_bytes
        adapter = self.run.weight_bytes * self.model.adapter
        return (matrix * self.model.layer_matrices + adapter) / self.model.layers

    # --- Gradients ---

    @property
    def trained(self) -> int:
        """Bytes of an entry of a gradient as the backward pass makes it."""
        if self.model.frozen and not (self.run.sharding.stage and self.run.loaded_bytes):
            return FLOAT32
        return self.run.weight_bytes

    @property
    def whole_gradients(self) -> float:
        """Bytes of the gradients of all trained weights as the backward pass makes them."""
        return self.trained * self._count

    @property
    def gradients(self) -> float:
        """What a rank has of the gradients at the update, on the device."""
        sharding = self.run.sharding
        if sharding.offloads_optimizer:
            return 0.0
        if sharding.stage and sharding.is_fsdp:
            return self.stored * self._count * sharding.share(GRADIENTS)
        if sharding.stage:
            return self.whole_gradients * sharding.share(OPTIMIZER)
        # Data parallelism exchanges them in buckets as large as themselves.
        return (2 if self.run.processes > 1 else 1) * self.whole_gradients

    @property
    def waiting(self) -> float:
        """What a rank has of them between the micro-batches of an update.

        ZeRO-1 and, unless `syncs`, FSDP add up whole gradients until the last micro-batch; ZeRO-1
        has its bucket by then.
        """
        sharding = self.run.sharding
        if sharding.is_zero and sharding.stage == OPTIMIZER:
            return self.whole_gradients + self.bucket
        if sharding.is_fsdp and sharding.stage and not sharding.syncs:
            return max(self.gradients, self.whole_gradients)
        return self.gradients

    @property
    def first_buckets(self) -> float:
        """Those of a backward pass of ZeRO-1, unless they have been waiting, and of ZeRO-2."""
        waits = self.run.sharding.stage == OPTIMIZER and self.run.accumulation > 1
        return 0.0 if waits or self.run.sharding.divides_weights else self.bucket

    @property
    def in_flight(self) -> float:
        """Gradients that a backward pass holds before they are divided."""
        model = self.model
        if model.frozen:
            return self.whole_gradients / model.layers
        if self.run.sharding.is_zero:
            return self.trained * max(model.largest_matrix, model.head)
        # Those of one layer, and the buffer they are reduced in.
        ends = model.parameters - model.layer_matrices
        return self.trained * (ends + 2 * model.layer_matrices / model.layers)

    @property
    def bucket(self) -> float:
        """The buffers in which DeepSpeed reduces gradients."""
        sharding = self.run.sharding
        return self.trained * sharding.bucket if sharding.is_zero and sharding.stage else 0.0

    # --- Optimizer ---

    @property
    def optimizer(self) -> float:
        """States, and the float32 weights that DeepSpeed updates in place of the model's own."""
        sharding, run = self.run.sharding, self.run
        entry = FLOAT32 if sharding.is_zero else self.stored
        states = state_bytes(run.optimizer, run.optimizer_args, self.model, entry)
        masters = FLOAT32 * self._count if sharding.is_zero else 0.0
        return (run.trained_models * states + masters) * sharding.share(OPTIMIZER)

    @property
    def update(self) -> float:
        """Bytes that the update itself needs: DeepSpeed's float32 copy of the gradients."""
        sharding = self.run.sharding
        if not sharding.is_zero or sharding.offloads_optimizer:
            return 0.0
        entries = self._count * sharding.share(OPTIMIZER)
        return FLOAT32 * (min(entries, sharding.sub_group) if sharding.divides_weights else entries)
