"""Write docs/benchmarks/big_plans.md: predicted memory and time of runs on 8 and 64 GPUs.

The runs are those in examples/cli_configs, and variants that differ in a few options. All figures
come from `trl memory-plan` and scripts/step_time.py. None is measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import step_time
from step_time import MACHINES, StepTime

from trl.cli.argv import to_argv
from trl.memory.plan import Plan
from trl.memory.rank_memory import RankMemory
from trl.memory.settings import RunSettings, Sharding
from trl.number_format import format_bytes

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "big_plans.md"
GPU = "h100"
VLLM = {"use_vllm": "true", "vllm_gpu_memory_utilization": "0.45", "vllm_mode": "colocate"}
VLLM_WITH_SLEEP = VLLM | {"vllm_enable_sleep_mode": "true"}
GATHER_ONCE = {"use_vllm": "false", "ds3_gather_for_generation": "true"}
GATHER_BY_LAYER = GATHER_ONCE | {"ds3_gather_for_generation": "false"}
SYNC_EACH_BATCH = {
    "accelerator_config": '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'
}
CONFIG_7B = "rloo_7b_8_gpus"
CONFIG_70B = "rloo_70b_64_gpus"
FSDP2_ON_8_MACHINES = {"accelerate_config": "examples/accelerate_configs/fsdp2_8_machines.yaml"}

# For each configuration, titles of runs with the options that differ from the file.
RUNS: dict[str, list[tuple[str, dict[str, str]]]] = {
    CONFIG_7B: [
        ("as configured: ZeRO-3, weights gathered once per round", {}),
        ("the same, one layer at a time", GATHER_BY_LAYER),
        ("ZeRO-2", {"accelerate_config": "zero2"}),
        ("FSDP2", {"accelerate_config": "fsdp2"}),
        ("ZeRO-3, states on the host", {"offload_optimizer_device": "cpu"}),
        ("LoRA, ZeRO-3", {"use_peft": "true"}),
        ("ZeRO-3, vLLM on the same GPUs", VLLM),
        ("ZeRO-3, vLLM with sleep mode", VLLM_WITH_SLEEP),
    ],
    CONFIG_70B: [
        ("as configured: ZeRO-3, vLLM with sleep mode, over 8 GPUs", {}),
        ("FSDP2, the same vLLM", FSDP2_ON_8_MACHINES),
        (
            "FSDP2, gradients sharded after each micro-batch",
            FSDP2_ON_8_MACHINES | SYNC_EACH_BATCH,
        ),
        ("ZeRO-3, weights gathered once per round", GATHER_ONCE),
        ("ZeRO-3, one layer at a time", GATHER_BY_LAYER),
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


def plan_run(config: str, changes: dict[str, str]) -> tuple[Plan, StepTime]:
    """Return the plan and the time of a run in examples/cli_configs with some other options."""
    argv = ["--config", f"examples/cli_configs/{config}.yaml", *to_argv(changes)]
    return step_time.plan_run(argv, MACHINES[GPU])


def markdown(rows: list[list[str]]) -> str:
    """Format a table; all columns but the first are aligned to the right."""
    lines = [rows[0], ["---"] + ["---:"] * (len(rows[0]) - 1), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def run_table(config: str) -> str:
    """Make a table of the bytes and seconds of each phase, with a row for each run."""
    phases = ["generation", "forward + backward", "optimizer"]
    header = [
        "run",
        *phases,
        "fits",
        "generation, s",
        "forward + backward, s",
        "update, s",
        "all, s",
    ]
    rows = [header]
    for title, changes in RUNS[config]:
        plan, time = plan_run(config, changes)
        peaks = [format_bytes(plan.estimate.phases[phase].total) for phase in phases]
        fits = "yes" if plan.fits() else "no"
        rows.append([title, *peaks, fits, *_seconds(time)])
    return markdown(rows)


def _seconds(time: StepTime) -> list[str]:
    """Return the seconds of generation, training, the update and their sum."""
    phases = time.phases
    generation = phases["prefill"].total + phases["decoding"].total
    training = phases["forward + backward"].total
    update = phases["optimizer"].total
    return [f"{value:.3g}" for value in (generation, training, update, time.total)]


def engine_table() -> str:
    """Make a table of what each of 8 ranks holds of a 7B model in half precision, by engine."""
    plan, _ = plan_run(CONFIG_7B, {})
    header = [
        "each of 8 ranks",
        "weights",
        "gradients at the update",
        "between micro-batches",
        "optimizer",
        "gathered in training",
        "gathered to generate",
        "layer by layer",
    ]
    rows = [header]
    for name, sharding in ENGINES.items():
        rank = RankMemory(plan.model, _run_settings(sharding))
        byte_counts: list[float] = [
            rank.weights,
            rank.gradients,
            rank.waiting,
            rank.optimizer,
            rank.training,
            rank.whole,
            rank.layerwise,
        ]
        rows.append([name, *map(format_bytes, byte_counts)])
    return markdown(rows)


def _run_settings(sharding: Sharding) -> RunSettings:
    """Return a run with bf16 and two micro-batches per update. Under DDP, weights are float32."""
    precision: dict[str, Any] = {"product_bytes": 2}
    if sharding.stage:
        precision |= {"weight_bytes": 2, "loaded_bytes": 4}
    return RunSettings(8, 512, 1024, 8, accumulation=2, processes=8, sharding=sharding, **precision)


def command_output(config: str) -> str:
    """Return the command that plans a run, with its output."""
    command = f"python scripts/step_time.py --gpu {GPU} --config examples/cli_configs/{config}.yaml"
    plan, time = plan_run(config, {})
    return f"```text\n$ {command}\n{step_time.as_text(plan, time)}\n```"


def page() -> str:
    """Make the page of the documentation."""
    sections = [
        INTRODUCTION,
        "## 7 billion parameters on 8 GPUs of 80 GB\n",
        run_table(CONFIG_7B) + "\n",
        command_output(CONFIG_7B) + "\n",
        "## 70 billion parameters on 8 machines of 8 GPUs of 80 GB\n",
        run_table(CONFIG_70B) + "\n",
        command_output(CONFIG_70B) + "\n",
        "## What each engine keeps where\n",
        "The model of 7 billion parameters with `bf16`, AdamW, several micro-batches per update.\n",
        engine_table() + "\n",
    ]
    return "\n".join(sections)


def main(argv: list[str] | None = None) -> int:
    """Write the page, or compare it with the plans; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is out of date")
    if not parser.parse_args(argv).check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE.relative_to(ROOT)} is not what the plans say: run `make big-plans`")
    return 1


if __name__ == "__main__":
    sys.exit(main())
