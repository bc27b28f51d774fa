"""The run of a configuration, as the memory plan takes it."""

from __future__ import annotations

import os
from typing import Any

import torch

from ...memory.settings import RunSettings
from .online_config import OnlineConfig

ASSUMED_PROMPT = 512  # tokens, where nothing says how long prompts are


def planned_run(args: OnlineConfig, **facts: Any) -> RunSettings:
    """What the options of a run say of its memory.

    Args:
        args (`OnlineConfig`): the options.
        facts: further fields of `RunSettings`, of the model and the device; they win.
    """
    batches = args.batch_plan
    options = {
        "group_size": batches.group_size,
        "completion": args.max_completion_length or 1,
        "micro_batch": batches.micro_batch,
        "slices": batches.slices,
        "accumulation": batches.accumulation,
        "passes": batches.iterations,
        "processes": batches.num_processes,
        "optimizer": str(getattr(args.optim, "value", args.optim)),
        "optimizer_args": args.optim_args,
        "gradient_checkpointing": bool(args.gradient_checkpointing),
        "reference": args.beta != 0.0,
        "scores_policy": args.scores_policy,
        "shared_prefix": args.shared_prefix,
        "logits_chunk": args.logits_chunk_size,
        "generation_rows": args.generation_max_rows,
        "generation_kv_gb": args.generation_max_kv_gb,
        "gathers": args.ds3_gather_for_generation,
    }
    return RunSettings(**(options | facts))


def device_bytes(device: torch.device) -> float:
    """Memory of a GPU, or of the machine for a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
