"""What each option that saves memory saves, and what time it costs: docs/benchmarks/options.md.

One prompt with eight completions, two steps of RLOO; each line changes what it names and runs in
its own process.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
from memory import OFF
from runs import RESULTS, Work, execute
from tables import markdown, megabytes

SIZES: dict[str, Any] = {
    "prompt": 1024,
    "completion": 128,
    "completions": 8,
    "vocabulary": 32_000,
    "shape": "small",
    "steps": 2,
}
TINY = SIZES | {"prompt": 16, "completion": 4, "vocabulary": 1000, "shape": "tiny"}
BF16 = {"model_init_kwargs": {"dtype": "bfloat16"}}
LEVEL = {"beta": 0.0, "level": True}
PHASES = ("generation", "scoring", "forward", "backward", "optimizer")
# title, options of the configuration, other fields of the work
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("defaults", {}, {}),
    ("shared_prefix=False", {"shared_prefix": False}, {}),
    ("logits_chunk_size=0", {"logits_chunk_size": 0}, {}),
    ("reuse_sampling_logps=False", {"reuse_sampling_logps": False}, {}),
    ("gradient_checkpointing=False", {"gradient_checkpointing": False}, {}),
    ("per_device_train_batch_size=2", {}, {"micro_batch": 2}),
    ("generation_max_rows=2", {"generation_max_rows": 2}, {}),
    ("generation_max_kv_gb=0.01", {"generation_max_kv_gb": 0.01}, {}),
    ("logits_chunk_size=2**18", {"logits_chunk_size": 2**18}, {}),
    ("beta=0", {}, {"beta": 0.0}),
    ('optim="adafactor"', {"optim": "adafactor"}, {}),
    ('optim="sgd"', {"optim": "sgd"}, {}),
    ('optim="adamw_bnb_8bit"', {"optim": "adamw_bnb_8bit"}, {}),
    ("LoRA of rank 16", {}, {"lora": True}),
    ('model_init_kwargs={"dtype": "bfloat16"}', BF16, {}),
    ("beta=0, six of eight rows without signal", {}, LEVEL),
    ("the same, skip_zero_advantages=False", {"skip_zero_advantages": False}, LEVEL),
    ("all savings off", OFF | {"gradient_checkpointing": False}, {}),
]


def row(title: str, run: dict[str, Any]) -> list[str]:
    """Make a row of the table, with the figures of the second step."""
    if "peak" not in run:
        return [title, run["error"], *["-"] * (len(PHASES) + 2)]
    last = run["steps"][-1]
    peaks = run["phase_peaks"]
    seconds = sum(last["cpu_seconds"].values())
    tokens = sum(last["tokens"].values())
    phases = [megabytes(peaks.get(name)) for name in PHASES]
    return [title, megabytes(run["peak"]), *phases, f"{seconds:.2f}", f"{tokens:,.0f}"]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS / "options.md")
    parser.add_argument("--tiny", action="store_true", help="the least sizes, to try the program")
    options = parser.parse_args()
    lines = []
    for title, chosen, fields in CASES:
        sizes = TINY if options.tiny else SIZES
        work = Work(**sizes | fields | {"options": json.dumps(chosen)})
        lines.append(row(title, execute(work)))
        print(" | ".join(lines[-1]), flush=True)
    headers = ["", "peak", *PHASES, "CPU seconds", "tokens"]
    text = (
        "# What each option saves\n\n"
        "One prompt of 1,024 tokens, eight completions of 128, two steps of RLOO with `beta=0.05`; "
        "a random Qwen3 with four layers, hidden size 256 and a tied vocabulary of 32,000; "
        "bfloat16 by autocast, one thread. Each line changes the option it names. Peaks are in MB "
        "above the start of `train()`, the higher of two steps, measured as on [this "
        "page](memory.md). Processor seconds and tokens through the model are those of the second "
        "step.\n\n"
        f"Made by `make bench-options` on {platform.machine()}, torch {torch.__version__}.\n\n"
        f"{markdown(headers, lines)}\n"
    )
    options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
