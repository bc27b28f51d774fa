"""A vLLM engine that holds base weights and an adapter apart, so that only the adapter is sent."""

import json
import tempfile
from collections.abc import Iterator, Sequence
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
from ...torch_internals import version_counter
from ..base import PolicyHandle
from .backend import VLLMColocateBackend
from .engine import VLLMEngine

ADAPTER = 1  # vLLM's number of the one adapter
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
SHARED_MEMORY = Path("/dev/shm")  # vLLM takes adapters from folders alone


@dataclass(frozen=True)
class LoraFactors:
    """The change of one linear layer, whose weight becomes `weight + second @ first`."""

    layer: str  # its name in the base model
    first: Tensor  # (rank, inputs)
    second: Tensor  # (outputs, rank), times the scale of the adapter


def why_not_plain_lora(model: nn.Module) -> str | None:
    """What makes a policy more than a frozen model with two factors for some of its layers.

    In words that follow "it has"; None if nothing does. Asked before it is wrapped for training.
    """
    if not is_peft_model(model):
        return "no adapter"
    config = cast(Any, model).active_peft_config
    if config.peft_type.value != "LORA":
        return f"an adapter of type {config.peft_type.value}, not LoRA"
    parts = {
        "modules_to_save": config.modules_to_save,
        "target_parameters": getattr(config, "target_parameters", None),
        "trainable_token_indices": getattr(config, "trainable_token_indices", None),
        "use_dora": config.use_dora,
        "lora_bias": config.lora_bias,
        "bias": config.bias != "none",
    }
    set_ones = [name for name, value in parts.items() if value]
    if set_ones:
        return f"an adapter with {', '.join(set_ones)}"
    causal = causal_model(model)
    ends = {id(causal.get_input_embeddings()), id(causal.get_output_embeddings())}
    for name, layer in adapted_layers(causal):
        if id(layer) in ends or not isinstance(layer.get_base_layer(), nn.Linear):
            return f"an adapter on {name}, which is not a linear layer inside the model"
        if layer.lora_variant or len(layer.active_adapters) != 1:
            return f"more than one pair of factors on {name}"
    return None


@torch.no_grad()
def lora_factors(model: nn.Module) -> Iterator[LoraFactors]:
    """Yield the factors of each layer, gathered where they are sharded; all ranks take them all."""
    gather = gather_of(model)
    for name, layer in adapted_layers(causal_model(model)):
        adapter = layer.active_adapters[0]
        pair = [layer.lora_A[adapter], layer.lora_B[adapter]]
        with nullcontext() if gather is None else gather(pair):
            first, second = (whole(m.weight).float().clone() for m in pair)
            yield LoraFactors(name, first, second * layer.scaling[adapter])


def base_weights_version(model: nn.Module) -> int:
    """A number that changes when a weight below the adapter does."""
    named = causal_model(model).named_parameters()
    return sum(version_counter(p) for name, p in named if not (p.requires_grad or "lora_" in name))


def adapter_arguments(policy: PolicyHandle, dtype: str) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that hold the adapter apart; a ValueError says why it cannot be."""
    words = "vllm_sync_adapter_only=True needs a LoRA adapter on a frozen model, but "
    reason = why_not_plain_lora(policy.model)
    if reason is not None:
        raise ValueError(f"{words}the policy has {reason}: leave the option out.")
    if policy.ranks.fsdp_version == 1:
        raise ValueError(f"{words}FSDP1 mixes both in one parameter: use FSDP2.")
    if dtype == "float32" and policy.device.type == "cuda":
        raise ValueError(
            "vllm_sync_adapter_only=True: on GPUs vLLM applies adapters in bfloat16 and float16 "
            "only: set bf16=True, or leave the option out."
        )
    pairs = {pair.layer: len(pair.first) for pair in lora_factors(policy.model)}
    rank = max(pairs.values())
    if rank > RANKS[-1]:
        raise ValueError(
            f"vllm_sync_adapter_only=True: vLLM holds adapters up to rank {RANKS[-1]}, and this "
            f"one has {rank}. Leave the option out, or lower the rank (lora_r)."
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(room for room in RANKS if room >= rank),
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in pairs}),
    }


class AdapterEngine(VLLMEngine):
    """An engine started with `adapter_arguments`, in which one adapter can be replaced."""

    @contextmanager
    def unwrapped(self) -> Iterator[None]:
        """Hide the modules that apply adapters: weights are looked up by the names below them."""
        wrappers = set(cast(Any, self.model.lora_manager).modules.values())
        wrapped: list[tuple[nn.Module, str, Any]] = [
            (module, name, child)
            for module in self.model.modules()
            for name, child in module.named_children()
            if child in wrappers
        ]
        try:
            for module, name, wrapper in wrapped:
                setattr(module, name, wrapper.base_layer)
            yield
        finally:
            for module, name, wrapper in wrapped:
                setattr(module, name, wrapper)

    def slots(self) -> dict[str, tuple[Tensor, Tensor]]:
        """First factors (rank, inputs) and second ones (outputs, rank) of layers before fusion."""
        found, manager = {}, cast(Any, self.model.lora_manager)
        for name, module in manager.modules.items():
            parent, _, last = name.rpartition(".")
            parts = manager.packed_modules_mapping.get(last, [last])
            pairs = zip(parts, module.lora_a_stacked, module.lora_b_stacked, strict=True)
            for part, first, second in pairs:
                found[f"{parent}.{part}"] = first[0, 0], second[0, 0]
        return found

    def load_adapter(self, factors: Sequence[LoraFactors]) -> None:
        """Replace the adapter; layers without factors are left without one."""
        rank = max(len(pair.first) for pair in factors)
        # Each layer brings its own scale in its second factor.
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": []}
        tensors = {}
        for pair in factors:
            name = f"base_model.model.{pair.layer}.lora_"
            tensors[f"{name}A.weight"] = pair.first.to("cpu", self.dtype).contiguous()
            tensors[f"{name}B.weight"] = pair.second.to("cpu", self.dtype).contiguous()
        place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        with tempfile.TemporaryDirectory(dir=place) as folder:
            save_file(tensors, Path(folder) / "adapter_model.safetensors")
            (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
            self._llm.llm_engine.add_lora(self._adapter(folder, load_inplace=True))

    def _adapter(self, folder: str = "loaded", **options: Any) -> Any:
        kind = require("vllm.lora.request", "vllm_sync_adapter_only=True").LoRARequest
        return kind("policy", ADAPTER, folder, **options)


class AdapterBackend(VLLMColocateBackend):
    """Sends base weights once and then the adapter alone, and proves that both arrived."""

    def __init__(self, engine: AdapterEngine, policy: PolicyHandle, **options: Any):
        weights = partial(full_weights, with_adapter=False)
        super().__init__(engine, policy, weights=weights, **options)
        self._adapted = engine
        self._base: object = None  # stamp of the base weights it holds
        layers = [pair.layer for pair in lora_factors(policy.model)]
        missing = [layer for layer in layers if layer not in engine.slots()]
        if missing:
            raise ValueError(
                f"vllm_sync_adapter_only=True: vLLM applies no adapter to {missing[0]}; leave the "
                "option out, or that layer out of the adapter."
            )

    def _send(self, weights: Iterator[tuple[str, Tensor]]) -> str | None:
        base, problem = base_weights_version(self.policy.model), None
        if not self._ranks.all(self._base == base):
            self._base = None
            with self._adapted.unwrapped():
                problem = super()._send(weights)
        # All ranks read the factors, also where there is a problem.
        factors = list(lora_factors(self.policy.model))
        if problem is None:
            self._adapted.load_adapter(factors)
            self._adapted.reset_prefix_cache()
            problem = adapter_mismatch(self._adapted.slots(), factors)
        self._base = None if problem else base
        return problem


def adapter_mismatch(
    slots: dict[str, tuple[Tensor, Tensor]], factors: Sequence[LoraFactors]
) -> str | None:
    """What is wrong with the adapter in `AdapterEngine.slots`, in words; None if nothing is."""
    sent, wrong = {pair.layer: pair for pair in factors}, []
    for name, held in slots.items():
        first, second = map(torch.zeros_like, held)  # where there is room for more
        if name in sent:
            rank = len(sent[name].first)
            first[:rank], second[:, :rank] = sent[name].first, sent[name].second
        if not (torch.equal(first, held[0]) and torch.equal(second, held[1])):
            wrong.append(name)
    if not wrong:
        return None
    more = f" and {len(wrong) - 1} more layers" if len(wrong) > 1 else ""
    return f"the adapter in {wrong[0]}{more} was not what was sent"
