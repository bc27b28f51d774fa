"""A vLLM engine that holds base weights and a LoRA adapter apart, so a sync sends the adapter only.

Factors of a layer are A (rank, inputs) and B (outputs, rank); its weight becomes W + B @ A.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ...imports import require
from ...models.sharded import gather_of, whole
from ...models.unwrap import causal_model, is_peft_model
from ...models.weights import adapted_layers, full_weights
from ...ops.torch_internals import version_counter
from ..base import PolicyHandle
from .backend import VLLMColocateBackend
from .engine import VLLMEngine

ADAPTER_ID = 1  # vLLM's number of the only adapter
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's `max_lora_rank`
SHARED_MEMORY = Path("/dev/shm")  # vLLM loads adapters from folders only


@dataclass(frozen=True)
class LoraFactors:
    """The factors of one linear layer."""

    layer: str  # its name in the base model
    a: Tensor  # (rank, inputs)
    b: Tensor  # (outputs, rank), times the scale of the adapter

    @property
    def rank(self) -> int:
        return len(self.a)


def why_not_plain_lora(model: nn.Module) -> str | None:
    """Return why a policy is not a frozen model with LoRA factors on linear layers, else None.

    The text continues "it has". Call this before the model is wrapped for training.
    """
    if not is_peft_model(model):
        return "no adapter"
    config = cast(Any, model).active_peft_config
    if config.peft_type.value != "LORA":
        return f"an adapter of type {config.peft_type.value}, not LoRA"
    unsupported_options = {
        "modules_to_save": config.modules_to_save,
        "target_parameters": getattr(config, "target_parameters", None),
        "trainable_token_indices": getattr(config, "trainable_token_indices", None),
        "use_dora": config.use_dora,
        "lora_bias": config.lora_bias,
        "bias": config.bias != "none",
    }
    names = [name for name, value in unsupported_options.items() if value]
    if names:
        return f"an adapter with {', '.join(names)}"
    causal = causal_model(model)
    embeddings = {id(causal.get_input_embeddings()), id(causal.get_output_embeddings())}
    for name, layer in adapted_layers(causal):
        if id(layer) in embeddings or not isinstance(layer.get_base_layer(), nn.Linear):
            return f"an adapter on {name}, which is not a linear layer inside the model"
        if layer.lora_variant or len(layer.active_adapters) != 1:
            return f"more than one pair of factors on {name}"
    return None


@torch.no_grad()
def lora_factors(model: nn.Module) -> Iterator[LoraFactors]:
    """Yield the factors of each layer, gathered from shards. All ranks iterate together."""
    gather = gather_of(model)
    for name, layer in adapted_layers(causal_model(model)):
        adapter = layer.active_adapters[0]
        modules = [layer.lora_A[adapter], layer.lora_B[adapter]]
        with nullcontext() if gather is None else gather(modules):
            a, b = (whole(module.weight).float().clone() for module in modules)
            yield LoraFactors(name, a, b * layer.scaling[adapter])


def base_weights_version(model: nn.Module) -> int:
    """Return a number that changes when a base weight is modified."""
    return sum(
        version_counter(parameter)
        for name, parameter in causal_model(model).named_parameters()
        if not parameter.requires_grad and "lora_" not in name
    )


def adapter_arguments(policy: PolicyHandle, dtype: str) -> dict[str, Any]:
    """Return arguments of `vllm.LLM` for an `AdapterEngine`.

    ValueError: vLLM cannot apply the policy's adapter in `dtype`.
    """
    requirement = "vllm_sync_adapter_only=True needs a LoRA adapter on a frozen model, but "
    reason = why_not_plain_lora(policy.model)
    if reason is not None:
        raise ValueError(f"{requirement}the policy has {reason}: leave the option out.")
    if policy.ranks.fsdp_version == 1:
        raise ValueError(f"{requirement}FSDP1 mixes both in one parameter: use FSDP2.")
    if dtype == "float32" and policy.device.type == "cuda":
        raise ValueError(
            "vllm_sync_adapter_only=True: on GPUs vLLM applies adapters in bfloat16 and float16 "
            "only: set bf16=True, or leave the option out."
        )
    layer_ranks = {factors.layer: factors.rank for factors in lora_factors(policy.model)}
    max_rank = max(layer_ranks.values())
    if max_rank > VLLM_RANKS[-1]:
        raise ValueError(
            f"vllm_sync_adapter_only=True: vLLM holds adapters up to rank {VLLM_RANKS[-1]}, and "
            f"this one has {max_rank}. Leave the option out, or lower the rank (lora_r)."
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in VLLM_RANKS if rank >= max_rank),
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in layer_ranks}),
    }


class AdapterEngine(VLLMEngine):
    """An engine with one adapter that can be replaced; start it with `adapter_arguments`."""

    @contextmanager
    def without_wrappers(self) -> Iterator[None]:
        """Take out the modules that apply adapters, so that base weights load by their names."""
        wrappers = set(self._lora_manager.modules.values())
        replaced: list[tuple[nn.Module, str, Any]] = [
            (parent, name, child)
            for parent in self.model.modules()
            for name, child in parent.named_children()
            if child in wrappers
        ]
        try:
            for parent, name, wrapper in replaced:
                parent.register_module(name, wrapper.base_layer)
            yield
        finally:
            for parent, name, wrapper in replaced:
                parent.register_module(name, wrapper)

    def loaded_factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the engine's A (rank, inputs) and B (outputs, rank) by layer name.

        Names are those of the policy, also of layers that vLLM fuses. The engine's rank may be
        larger than the adapter's.
        """
        factors = {}
        for name, module in self._lora_manager.modules.items():
            parent, _, last_name = name.rpartition(".")
            unfused_names = self._lora_manager.packed_modules_mapping.get(last_name, [last_name])
            for unfused_name, a, b in zip(
                unfused_names, module.lora_a_stacked, module.lora_b_stacked, strict=True
            ):
                factors[f"{parent}.{unfused_name}"] = (a[0, 0], b[0, 0])
        return factors

    def load_adapter(self, all_factors: Sequence[LoraFactors]) -> None:
        """Replace the adapter. Layers without factors have none in the new adapter."""
        rank = max(factors.rank for factors in all_factors)
        # lora_alpha / r is 1: the scale is in B already.
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": []}
        tensors = {}
        for factors in all_factors:
            prefix = f"base_model.model.{factors.layer}"
            tensors[f"{prefix}.lora_A.weight"] = factors.a.to("cpu", self.dtype).contiguous()
            tensors[f"{prefix}.lora_B.weight"] = factors.b.to("cpu", self.dtype).contiguous()
        directory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            save_file(tensors, Path(folder) / "adapter_model.safetensors")
            (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
            self._llm.llm_engine.add_lora(self._make_lora_request(folder, load_inplace=True))

    @property
    def _lora_manager(self) -> Any:
        return cast(Any, self.model).lora_manager

    def _lora_request(self) -> Any:
        return self._make_lora_request("loaded", load_inplace=False)

    def _make_lora_request(self, folder: str, load_inplace: bool) -> Any:
        module = require("vllm.lora.request", "vllm_sync_adapter_only=True")
        return module.LoRARequest("policy", ADAPTER_ID, folder, load_inplace=load_inplace)


class AdapterBackend(VLLMColocateBackend):
    """Sends base weights once and then the adapter alone, and verifies that both arrived."""

    def __init__(
        self,
        engine: AdapterEngine,
        policy: PolicyHandle,
        **options: Any,  # of `VLLMColocateBackend`
    ):
        weights = partial(full_weights, with_adapter=False)
        super().__init__(engine, policy, weights=weights, **options)
        self._adapter_engine = engine
        self._base_version: int | None = None  # of the base weights that the engine holds
        applied = engine.loaded_factors()
        missing = [
            factors.layer for factors in lora_factors(policy.model) if factors.layer not in applied
        ]
        if missing:
            raise ValueError(
                f"vllm_sync_adapter_only=True: vLLM applies no adapter to {missing[0]}; leave the "
                "option out, or that layer out of the adapter."
            )

    def _send_weights(self, weights: Iterator[tuple[str, Tensor]]) -> str | None:
        base_version = base_weights_version(self.policy.model)
        problem = None
        if not self._ranks.all(self._base_version == base_version):
            self._base_version = None
            with self._adapter_engine.without_wrappers():
                problem = super()._send_weights(weights)
        # Gathers shards, so even a rank with a problem must read all factors.
        all_factors = list(lora_factors(self.policy.model))
        if problem is None:
            self._adapter_engine.load_adapter(all_factors)
            self._adapter_engine.reset_prefix_cache()
            problem = adapter_mismatch(self._adapter_engine.loaded_factors(), all_factors)
        self._base_version = base_version if problem is None else None
        return problem


def adapter_mismatch(
    loaded: Mapping[str, tuple[Tensor, Tensor]], sent: Sequence[LoraFactors]
) -> str | None:
    """Return an error text if the engine's adapter is not the one that was sent, else None.

    `loaded` is `AdapterEngine.loaded_factors()`.
    """
    sent_by_layer = {factors.layer: factors for factors in sent}
    wrong = []
    for name, (loaded_a, loaded_b) in loaded.items():
        # Zero where the engine has a larger rank, and in layers without an adapter.
        expected_a = torch.zeros_like(loaded_a)
        expected_b = torch.zeros_like(loaded_b)
        factors = sent_by_layer.get(name)
        if factors is not None:
            expected_a[: factors.rank] = factors.a
            expected_b[:, : factors.rank] = factors.b
        if not (torch.equal(expected_a, loaded_a) and torch.equal(expected_b, loaded_b)):
            wrong.append(name)
    if not wrong:
        return None
    layers = wrong[0]
    if len(wrong) > 1:
        layers += f" and {len(wrong) - 1} more layers"
    return f"the adapter in {layers} differs from what was sent"
