"""How ranks divide weights, gradients and optimizer states: data parallelism, ZeRO and FSDP.

The defaults are those of DeepSpeed's `zero_optimization`, and of FSDP as accelerate sets it up
(`FullyShardedDataParallelPlugin`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

WHOLE, OPTIMIZER, GRADIENTS, WEIGHTS = range(4)  # what is divided: that, and all before it

# FSDP_RESHARD_AFTER_FORWARD and fsdp_sharding_strategy, in the words of both versions.
STRATEGIES = {
    "full_shard": (WEIGHTS, False, False),
    "shard_grad_op": (WEIGHTS, True, False),
    "no_shard": (WHOLE, True, False),
    "hybrid_shard": (WEIGHTS, False, True),
    "hybrid_shard_zero2": (WEIGHTS, True, True),
    "true": (WEIGHTS, False, False),
    "false": (WEIGHTS, True, False),
}
NUMBERS = dict(zip("12345", STRATEGIES, strict=False))  # of the first five


@dataclass(frozen=True)
class Sharding:
    """Who holds what."""

    engine: str = "ddp"  # or "zero" (DeepSpeed), "fsdp1", "fsdp2"
    stage: int = WHOLE  # WEIGHTS is what FSDP does
    ranks: int = 1  # that divide one copy among them; fewer than all under hybrid sharding
    keeps_weights: bool = False  # gathered weights stay until the backward pass is done
    offloads_optimizer: bool = False  # to the memory of the host
    offloads_weights: bool = False
    syncs: bool = False  # gradients are reduced after each micro-batch; if not, FSDP sums them
    bucket: int = 500_000_000  # entries of the buffer in which gradients are reduced
    live: int = 1_000_000_000  # entries of weights that ZeRO-3 keeps gathered
    sub_group: int = 1_000_000_000  # entries that it updates at a time

    def replace(self, **changes: Any) -> Sharding:
        """Return a copy with fields changed."""
        return replace(self, **changes)

    @property
    def is_zero(self) -> bool:
        """Whether DeepSpeed trains."""
        return self.engine == "zero"

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP trains."""
        return self.engine.startswith("fsdp")

    @property
    def divides_weights(self) -> bool:
        """Whether a rank holds a part of each weight only."""
        return self.stage >= WEIGHTS

    def share(self, what: int) -> float:
        """The part of it that one rank holds: 1 or 1 / ranks."""
        return 1 / self.ranks if self.stage >= what else 1.0

    @property
    def name(self) -> str:
        """As people call it."""
        if self.is_zero:
            return f"ZeRO-{self.stage}"
        if not self.is_fsdp:
            return "DDP"
        kept = ", weights kept until the backward pass" if self.keeps_weights else ""
        return f"{self.engine.upper()}{kept if self.stage else ', nothing divided'}"


def read_sharding(options: Mapping[str, Any], ranks: int, machines: int = 1) -> Sharding:
    """What the options of `accelerate launch` mean.

    Args:
        options: under their names there, such as `zero_stage`; also those of the `fsdp_config` and
            the `deepspeed_config` of a configuration file. `use_deepspeed` or `use_fsdp` chooses.
        ranks (`int`): of all machines.
        machines (`int`): nodes.

    Raises:
        ValueError: for a sharding strategy that is not known.
        OSError: if the file of DeepSpeed's own options cannot be read.
    """
    if options.get("use_deepspeed"):
        return _zero(options, ranks)
    if options.get("use_fsdp"):
        return _fsdp(options, ranks, machines)
    return Sharding(ranks=ranks)


def _zero(options: Mapping[str, Any], ranks: int) -> Sharding:
    own: dict[str, Any] = {}
    file = options.get("deepspeed_config_file")
    if file not in (None, "none"):
        own = json.loads(Path(str(file)).read_text(encoding="utf-8")).get("zero_optimization", {})
    entries = {
        "bucket": own.get("reduce_bucket_size"),
        "live": own.get("stage3_max_live_parameters"),
        "sub_group": own.get("sub_group_size"),
    }
    stage = int(own.get("stage", options.get("zero_stage") or 2))
    return Sharding(
        engine="zero",
        stage=stage,
        ranks=ranks,
        offloads_optimizer=_offloads(options, own, "optimizer"),
        offloads_weights=stage == WEIGHTS and _offloads(options, own, "param"),
        syncs=True,
        **{k: int(v) for k, v in entries.items() if isinstance(v, int | float)},  # not "auto"
    )


def _offloads(options: Mapping[str, Any], own: Mapping[str, Any], what: str) -> bool:
    chosen = own.get(f"offload_{what}", {}).get("device")
    return (chosen or options.get(f"offload_{what}_device") or "none") != "none"


def _fsdp(options: Mapping[str, Any], ranks: int, machines: int) -> Sharding:
    version = str(options.get("fsdp_version") or 1)
    given = options.get("fsdp_reshard_after_forward")
    if version == "1":
        given = options.get("fsdp_sharding_strategy") or given
    word = str("full_shard" if given is None else given).lower()
    word = NUMBERS.get(word, word)
    if word not in STRATEGIES:
        raise ValueError(f"fsdp_sharding_strategy={given}: choose from {', '.join(STRATEGIES)}.")
    stage, keeps, is_hybrid = STRATEGIES[word]
    offloads = str(options.get("fsdp_offload_params", "false")).lower() == "true"
    return Sharding(
        engine=f"fsdp{version}",
        stage=stage,
        ranks=max(1, ranks // machines) if is_hybrid else ranks,
        keeps_weights=keeps,
        offloads_optimizer=offloads,
        offloads_weights=offloads,
    )


def options_of_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The options of `read_sharding` that `accelerate launch` hands to its workers."""
    deepspeed = ("zero_stage", "offload_optimizer_device", "offload_param_device")
    names = {f"ACCELERATE_DEEPSPEED_{name.upper()}": name for name in deepspeed}
    names["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = "deepspeed_config_file"
    names |= {f"ACCELERATE_{name.upper()}": name for name in ("use_deepspeed", "use_fsdp")}
    fsdp = ("version", "sharding_strategy", "reshard_after_forward", "offload_params")
    names |= {f"FSDP_{name.upper()}": f"fsdp_{name}" for name in fsdp}
    found: dict[str, Any] = {v: environment[k] for k, v in names.items() if k in environment}
    for name in ("use_deepspeed", "use_fsdp"):
        found[name] = str(found.get(name, "false")).lower() == "true"
    return found
