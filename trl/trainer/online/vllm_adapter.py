"""Sending an adapter alone to vLLM: when that can be done, and with what."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from ...generation.vllm.adapter_engine import AdapterPolicy
from ...generation.vllm.backend import Policy
from ...generation.vllm.engine import EngineSettings
from ...models.lora_factors import base_stamp, base_weights, low_rank_factors, why_not_low_rank
from ...models.policy_handle import PolicyHandle

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for


def adapter_settings(policy: PolicyHandle, settings: EngineSettings) -> EngineSettings:
    """Settings of an engine that holds the adapter of a policy apart.

    Args:
        policy (`PolicyHandle`): what generates.
        settings (`EngineSettings`): of an engine without.

    Raises:
        ValueError: if the policy is more than a frozen model with a LoRA adapter, or vLLM has no
            room for the adapter or cannot compute with it.
    """
    words = "vllm_sync_adapter_only=True needs a LoRA adapter on a frozen model, but "
    reason = why_not_low_rank(policy.model)
    if reason is not None:
        raise ValueError(f"{words}the policy has {reason}: leave the option out.")
    if policy.ranks.fsdp_version == 1:
        raise ValueError(f"{words}FSDP1 mixes both in one parameter: use FSDP2.")
    if settings.dtype == torch.float32 and policy.device.type == "cuda":
        raise ValueError(
            "vllm_sync_adapter_only=True: on GPUs vLLM applies adapters in bfloat16 and float16 "
            "only: set bf16=True, or leave the option out."
        )
    pairs = {pair.layer: len(pair.first) for pair in low_rank_factors(policy.model)}
    return replace(
        settings,
        adapter_rank=room_for(max(pairs.values())),
        adapter_layers=tuple(sorted({name.rpartition(".")[2] for name in pairs})),
    )


def room_for(rank: int) -> int:
    """The smallest rank that vLLM makes room for and that an adapter fits in.

    Raises:
        ValueError: if there is none.
    """
    if rank > RANKS[-1]:
        raise ValueError(
            f"vllm_sync_adapter_only=True: vLLM holds adapters up to rank {RANKS[-1]}, and this "
            f"one has {rank}. Leave the option out, or lower the rank (lora_r)."
        )
    return next(room for room in RANKS if room >= rank)


def adapter_policy(policy: Policy, handle: PolicyHandle) -> AdapterPolicy:
    """A policy of which base weights and adapter are read apart.

    Args:
        policy (`Policy`): as it is read as a whole.
        handle (`PolicyHandle`): of the same policy.
    """
    parts: dict[str, Any] = {part.name: getattr(policy, part.name) for part in fields(policy)}
    parts["weights"] = lambda: base_weights(handle.model)
    return AdapterPolicy(
        **parts,
        factors=lambda: low_rank_factors(handle.model),
        base_stamp=lambda: base_stamp(handle.model),
    )
