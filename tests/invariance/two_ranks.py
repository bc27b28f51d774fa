"""Gradients and loss curves of two real processes under each engine: `two_ranks.py`."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from engines import Job, finish, report, use
from trajectories import CLASSES, OPTIMIZERS, curve
from variants import TILE, Variant, is_as_expected, measure

TWO = Variant(ranks=2)
VARIANTS = [
    TWO,
    TWO.but(shared=False, loss="dapo", padding="junk"),
    # Every group is half on one rank and half on the other.
    TWO.but(loss="rloo, KL", micro_batch=2, rounds=4, order=1),
    TWO.but(model="Qwen3", loss="grpo, KL", micro_batch=2, rounds=2, passes=True),
    TWO.but(model="Granite, logits scaling", passes=True, lora=True, micro_batch=8),
    TWO.but(model="Llama, tied head", loss="dapo, entropy bonus", micro_batch=8, padding="eos"),
    TWO.but(model="Gemma3, soft-capped logits", loss="rloo, second pass", micro_batch=2, logs=True),
    TWO.but(model="Phi, head bias", loss="gspo, second pass", shared=False, chunk=0),
    TWO.but(model="Qwen3", loss="online dpo, ipo", micro_batch=2, rounds=2, passes=True),
    # Whitening and means are over both ranks, whose completions differ in number of tokens.
    TWO.but(loss="ppo, whitened rewards", micro_batch=2, rounds=2, lora=True),
    TWO.but(loss="ppo, second pass", shared=False, padding="junk"),
    # Ranks cut their micro-batches into different numbers of forwards.
    TWO.but(loss="dapo, top entropies", micro_batch=8, tokens=40),
    TWO.but(loss="dapo, scaled by the round", micro_batch=2, rounds=2, tokens=40),
]
# Beside DDP; the tests of `tests/distributed` go through all engines.
OTHERS = ("fsdp2", "zero2", "zero3")
# What engines may do differently: gather weights, keep gradients, recompute.
EVERYWHERE = [
    TWO.but(loss="rloo, KL", micro_batch=2, chunk=TILE),
    TWO.but(model="Llama, tied head", loss="dapo, entropy bonus", checkpointing=True),
    TWO.but(model="Gemma3, soft-capped logits", loss="dapo", shared=False, logs=True),
    TWO.but(model="Phi, head bias", micro_batch=1, chunk=0),
    TWO.but(lora=True, checkpointing=True, micro_batch=2),
    TWO.but(loss="online dpo", micro_batch=2),
    TWO.but(loss="ppo", checkpointing=True),
    TWO.but(model="Qwen3", loss="ppo, value model", micro_batch=8),
]
ON_ENGINES = [variant.but(engine=engine) for engine in OTHERS for variant in EVERYWHERE]
# One rank has a micro-batch without signal.
EXACT = [TWO.but(single_zeros=False), TWO.but(single_zeros=False, shared=False)]


def start() -> Job:
    """Both ranks, running beside what this process does."""
    return Job(__file__, "ddp")


def result(job: Job) -> dict[Any, Any]:
    """Gradients of variants, and curves of (class, optimizer).

    Raises:
        RuntimeError: if a rank failed.
    """
    return job.result()[0]


def gradient(variant: Variant) -> torch.Tensor:
    """That of a variant; NaN if prompts were not shared as they should be."""
    measured = measure(variant)
    return measured.gradient if is_as_expected(variant, measured) else measured.gradient * torch.nan


def run(engine: str) -> dict[Any, Any]:
    """All that is measured under an engine."""
    use(engine)
    variants = [variant for variant in ON_ENGINES if variant.engine == engine]
    if engine == "ddp":
        variants = VARIANTS + [v.but(skip=skip) for v in EXACT for skip in (True, False)]
    found: dict[Any, Any] = {variant: gradient(variant) for variant in variants}
    for name, variant in CLASSES.items():
        if variant.ranks == 2 and variant.engine == engine:
            found |= {(name, optimizer): curve(name, optimizer) for optimizer in OPTIMIZERS}
    return found


def main() -> None:
    """What each rank does."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found: dict[Any, Any] = {}
    for engine in ("ddp", *OTHERS):
        found |= run(engine)
        report(found)
    finish()


if __name__ == "__main__":
    main()
