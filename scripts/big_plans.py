"""Memory and time of runs that need 8 and 64 GPUs, predicted: docs/benchmarks/big_plans.md.

The runs are those of examples/cli_configs, and some that differ from them in a few options. All
figures are those of `trl memory-plan` and scripts/step_time.py; none is measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import step_time
from step_time import MACHINES, StepTime

from trl.memory.plan import Plan
from trl.memory.rank_memory import RankMemory
from trl.memory.settings import RunSettings, Sharding
from trl.number_format import format_bytes

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "big_plans.md"
GPU = "h100"
VLLM = {"use_vllm": "true", "vllm_gpu_memory_utilization": "0.45", "vllm_mode": "colocate"}
SLEEP = VLLM | {"vllm_enable_sleep_mode": "true"}
TRANSFORMERS = {"use_vllm": "false", "ds3_gather_for_generation": "true"}
LAYERS = TRANSFORMERS | {"ds3_gather_for_generation": "false"}
DIVIDED = {"accelerator_config": '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'}
SEVEN, SEVENTY = "rloo_7b_8_gpus", "rloo_70b_64_gpus"
FAR = "examples/accelerate_configs/fsdp2_8_machines.yaml"

# title, options that differ from those of the file
RUNS: dict[str, list[tuple[str, dict[str, str]]]] = {
    SEVEN: [
        ("as configured: ZeRO-3, weights gathered once per round", {}),
        ("the same, one layer at a time", LAYERS),
        ("ZeRO-2", {"accelerate_config": "zero2"}),
        ("FSDP2", {"accelerate_config": "fsdp2"}),
        ("ZeRO-3, states on the host", {"offload_optimizer_device": "cpu"}),
        ("LoRA, ZeRO-3", {"use_peft": "true"}),
        ("ZeRO-3, vLLM on the same GPUs", VLLM),
        ("ZeRO-3, vLLM with sleep mode", SLEEP),
    ],
    SEVENTY: [
        ("as configured: ZeRO-3, vLLM with sleep mode, over 8 GPUs", {}),
        ("FSDP2, the same vLLM", {"accelerate_config": FAR}),
        ("FSDP2, gradients sharded after each micro-batch", {"accelerate_config": FAR} | DIVIDED),
        ("ZeRO-3, weights gathered once per round", TRANSFORMERS),
        ("ZeRO-3, one layer at a time", LAYERS),
        ("LoRA, ZeRO-3, the same vLLM", {"use_peft": "true"}),
    ],
}
ENGINES = {
    "DDP": Sharding(ranks=8),
    "ZeRO-1": Sharding("zero", 1, 8, syncs=True),
    "ZeRO-2": Sharding("zero", 2, 8, syncs=True),
    "ZeRO-3": Sharding("zero", 3, 8, syncs=True),
    "FSDP1": Sharding("fsdp1", 3, 8),
    "FSDP2": Sharding("fsdp2", 3, 8),
}
INTRODUCTION = """# Plans for 8 and 64 GPUs

Written by `make big-plans`. Bytes are predicted by `trl memory-plan`, and seconds by
`scripts/step_time.py`. Nothing here was measured on GPUs. On two CPU processes, the measured bytes
of weights, gradients and states under each engine are within 2 % of the prediction
(`tests/distributed/test_held_bytes.py`).
"""


def planned(config: str, changes: dict[str, str]) -> tuple[Plan, StepTime]:
    """The plan of a run of examples/cli_configs with a few other options, and its time."""
    words = ["--config", f"examples/cli_configs/{config}.yaml"]
    words += [word for name, value in changes.items() for word in (f"--{name}", value)]
    return step_time.planned(words, MACHINES[GPU])


def markdown(rows: list[list[str]]) -> str:
    """A table; all columns but the first are aligned to the right."""
    lines = [rows[0], ["---"] + ["---:"] * (len(rows[0]) - 1), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def run_table(config: str) -> str:
    """Bytes and seconds of each phase, a line for each run."""
    heads = ["generation", "forward + backward", "optimizer"]
    rows = [["run", *heads, "fits"]]
    rows[0] += ["generation, s", "forward + backward, s", "update, s", "all, s"]
    for title, changes in RUNS[config]:
        found, time = planned(config, changes)
        rows.append([title, *_bytes(found, heads), *_seconds(time)])
    return markdown(rows)


def _bytes(plan: Plan, phases: list[str]) -> list[str]:
    totals = [format_bytes(plan.estimate.phases[name].total) for name in phases]
    return [*totals, "yes" if plan.fits() else "no"]


def _seconds(time: StepTime) -> list[str]:
    phases = time.phases
    generation = phases["prefill"].total + phases["decoding"].total
    rest = [phases[name].total for name in ("forward + backward", "optimizer")]
    return [f"{value:.3g}" for value in (generation, *rest, time.total)]


def engine_table() -> str:
    """Who keeps what: bytes on each of 8 ranks, in half precision, for the model of 7 billion."""
    model = planned(SEVEN, {})[0].model
    rows = [["each of 8 ranks", "weights", "gradients at the update", "between micro-batches"]]
    rows[0] += ["optimizer", "gathered in training", "gathered to generate", "layer by layer"]
    for name, sharding in ENGINES.items():
        run = _run(sharding)
        rank = RankMemory(model, run)
        parts: list[float] = [rank.weights, rank.gradients, rank.waiting, rank.optimizer]
        parts += [rank.training, rank.whole, rank.layerwise]
        rows.append([name, *map(format_bytes, parts)])
    return markdown(rows)


def _run(sharding: Sharding) -> RunSettings:
    """Micro-batches that are accumulated under bf16; DDP has float32 weights then."""
    half: dict[str, Any] = {"weight_bytes": 2, "product_bytes": 2, "loaded_bytes": 4}
    precision = half if sharding.stage else {"product_bytes": 2}
    return RunSettings(8, 512, 1024, 8, accumulation=2, processes=8, sharding=sharding, **precision)


def full(config: str) -> str:
    """The plan as the command prints it."""
    command = f"python scripts/step_time.py --gpu {GPU} --config examples/cli_configs/{config}.yaml"
    return f"```text\n$ {command}\n{step_time.text(*planned(config, {}))}\n```"


def page() -> str:
    """The page of the documentation."""
    parts = [
        INTRODUCTION,
        "## 7 billion parameters on 8 GPUs of 80 GB\n",
        run_table(SEVEN) + "\n",
        full(SEVEN) + "\n",
        "## 70 billion parameters on 8 machines of 8 GPUs of 80 GB\n",
        run_table(SEVENTY) + "\n",
        full(SEVENTY) + "\n",
        "## What each engine keeps where\n",
        "The model of 7 billion parameters with `bf16`, AdamW, several micro-batches per update.\n",
        engine_table() + "\n",
    ]
    return "\n".join(parts)


def main(words: list[str] | None = None) -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is out of date")
    if not parser.parse_args(words).check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE.relative_to(ROOT)} is not what the plans say: run `make big-plans`")
    return 1


if __name__ == "__main__":
    sys.exit(main())
