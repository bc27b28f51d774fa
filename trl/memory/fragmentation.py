"""When to give cached memory back to the device."""

from __future__ import annotations

import torch

from ..text import did_you_mean
from .probes import fragmentation

POLICIES = ("never", "auto", "always")
THRESHOLD = 0.25
FLOOR = 256 * 2**20


def should_empty_cache(
    policy: str,
    allocated: int,
    reserved: int,
    threshold: float = THRESHOLD,
    floor: int = FLOOR,
) -> bool:
    """Say whether the allocator should return its unused blocks to the device.

    Args:
        policy (`str`): `"never"`; `"always"`, if there are any (arXiv 2410.15651); `"auto"`, if
            they are more than `threshold` of what is reserved and at least `floor`.
        allocated (`int`): bytes that tensors use.
        reserved (`int`): bytes that the allocator holds.
        threshold (`float`): share of `reserved`, 0 to 1.
        floor (`int`): bytes for which waiting for the device and allocating anew is worth it.

    Raises:
        ValueError: if `policy` or `threshold` is none of these.
    """
    if policy not in POLICIES:
        legal = f" It must be one of {', '.join(POLICIES)}."
        raise ValueError(
            f"empty_cache={policy!r} is unknown.{did_you_mean(policy, POLICIES, legal)}"
        )
    if not 0.0 <= threshold <= 1.0:
        nearest = min(max(threshold, 0.0), 1.0)
        raise ValueError(f"threshold={threshold} is no share. Nearest legal: {nearest:g}.")
    unused = reserved - allocated
    if policy == "auto":
        return unused >= floor and fragmentation(allocated, reserved) > threshold
    return policy == "always" and unused > 0


def release_cached_blocks(policy: str, device: torch.device | str) -> bool:
    """Return unused blocks of a CUDA device to it, if `should_empty_cache` says so.

    Call it where little is alive: after generation and after scoring. Tensors are not touched.

    Returns:
        `bool`: whether it was done; always False on other devices.
    """
    device = torch.device(device)
    held = (0, 0)
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    decided = should_empty_cache(policy, *held)
    if decided:
        torch.cuda.empty_cache()
    return decided
