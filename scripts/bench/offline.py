"""Peak memory, positions and processor time of one update of SFT: docs/benchmarks/offline.md.

A random Qwen3 (hidden 64, 2 layers, 151,936 entries, tied), float32, SGD, eight rows or packs, one
thread. Figures of Hugging Face's releases were measured on the same work, with the same kind of
meter, on 22 November 2026, and are not measured again here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from meter import ROOT, CpuBytes, preload
from tables import markdown

PAGE = ROOT / "docs" / "benchmarks" / "offline.md"
VOCABULARY = 151_936
FEW_ENTRIES = 8192
PIECE = "max_tokens_per_piece"
# name: length, kind, options, megabytes of 0.22.2 and 1.16.0 (its GPU path), the goal
CASES: dict[str, tuple[int, str, dict[str, Any], str, str, int | None]] = {
    "1,024 tokens": (1024, "fixed", {}, "14,940", "591", 75),
    "lognormal, longest 1,024": (1024, "lognormal", {}, "14,950", "430", 75),
    "packs of 1,024": (1024, "pack", {"packing": True}, "22,530", "592", 75),
    "4,096 tokens": (4096, "fixed", {}, "59,770", "630", 90),
    "1,024 tokens, chunks of 1,024": (*(1024, "fixed"), {PIECE: 1024}, "14,940", "591", None),
    "1,024 tokens, chunks of 4,096": (*(1024, "fixed"), {PIECE: 4096}, "14,940", "591", None),
    "1,024 tokens, in one chunk": (*(1024, "fixed"), {PIECE: 0}, "14,940", "591", None),
}
# What options of memory change, by the names that users know.
FEATURES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "default": (1024, "lognormal", {}),
    "truncation: `max_length=512`": (512, "lognormal", {}),
    "`padding_free=True`": (1024, "lognormal", {"padding_free": True}),
    "packing: `packing=True`": (1024, "pack", {"packing": True}),
    "Liger loss: `use_liger_loss=True`": (1024, "lognormal", {"use_liger_loss": True}),
    "all logits at once: `logits_chunk_size=0`": (1024, "lognormal", {"logits_chunk_size": 0}),
    "no chunks: `max_tokens_per_piece=0`": (1024, "lognormal", {PIECE: 0}),
    "no checkpointing: `gradient_checkpointing=False`": (
        *(1024, "lognormal"),
        {"gradient_checkpointing": False},
    ),
    'selective checkpointing: `gradient_checkpointing_kwargs={"selective": True}`': (
        *(1024, "lognormal"),
        {"gradient_checkpointing_kwargs": {"selective": True}},
    ),
}
TINY = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
DEEP = TINY | {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 12}


def lengths(length: int, kind: str, count: int = 8) -> list[int]:
    """Return the lengths of the documents of a case, in tokens."""
    draw = random.Random(0)

    def one(median: int) -> int:
        return max(16, min(length, int(median * math.exp(draw.gauss(0, 0.8)))))

    if kind == "fixed":
        return [length] * count
    row_lengths: list[int] = []
    if kind == "lognormal":
        row_lengths = [one(length // 3) for _ in range(count)]
        return [length, *row_lengths[1:]]
    while sum(row_lengths) < (count - 0.1) * length:
        row_lengths.append(one(max(32, length // 8)))
    return row_lengths


def measure(name: str) -> dict[str, float]:
    """Measure one update in this process."""
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.tiny import tiny_tokenizer
    from trl import SFTConfig, SFTTrainer

    length, kind, options, *_ = (CASES | FEATURES)[name]
    vocabulary, shape = (VOCABULARY, TINY) if name in CASES else (FEW_ENTRIES, DEEP)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=vocabulary, **shape, tie_word_embeddings=True)
    model = Qwen3ForCausalLM(config)
    # What is cut is as long as elsewhere.
    draw = random.Random(1)
    sizes = lengths(1024 if name in FEATURES else length, kind)
    rows = [[draw.randrange(2, vocabulary) for _ in range(size)] for size in sizes]
    settings = {"max_steps": 1, "optim": "sgd", "report_to": "none", "save_strategy": "no"}
    settings |= {"use_cpu": True, "bf16": False, "disable_tqdm": True, "log_memory": False}
    trainer = SFTTrainer(
        model,
        SFTConfig(tempfile.mkdtemp(), max_length=length, **settings, **options),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tiny_tokenizer(),
    )
    trainer.begin_training = lambda: None
    counter = CpuBytes()
    started = time.process_time()
    counter.reset()
    trainer.train()
    return {
        "peak": counter.peak(),
        "positions": trainer.state.num_input_tokens_seen,
        "padded": max(sizes) * len(sizes),
        "seconds": time.process_time() - started,
    }


def row(name: str, result: dict[str, float]) -> list[str]:
    """Make a row of the table."""
    *_, old, new, goal = CASES[name]
    peak = result["peak"] / 1e6
    verdict = "" if goal is None else f"{goal}: {'holds' if peak <= goal else 'does not hold'}"
    fewer = f"{result['positions']:,.0f} ({result['padded'] / result['positions']:.2f}x fewer)"
    return [name, old, new, f"{peak:.0f}", verdict, fewer, f"{result['seconds']:.1f}"]


def feature_row(name: str, result: dict[str, float], default: float) -> list[str]:
    """Make a row of the table of options."""
    peak = result["peak"] / 1e6
    ratio = result["peak"] / default
    return [name, f"{peak:.1f}", f"{ratio:.2f}", f"{result['positions']:,.0f}"]


def divided() -> str:
    """Compare peaks of one process and of two ranks with context parallelism."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "distributed")]
    import context_step
    from engines import launch

    with tempfile.TemporaryDirectory() as folder:
        script = Path(context_step.__file__)
        many = launch(script, "fsdp2", Path(folder, "2"), 2, "fsdp2:peak", processes=2)
        single_peak = context_step.peak(Path(folder, "1"), 2, 1, use_cpu=True)["peak"]
    ours = max(result["fsdp2:peak"]["peak"] for result in many)
    return (
        f"Context parallelism (`cp_size=2`, FSDP2): a rank holds at most {ours / 1e6:.2f} MB in an "
        f"update of four rows of {context_step.LENGTH} tokens with a smaller model, and a single "
        f"process {single_peak / 1e6:.2f} MB."
    )


def offloaded() -> str:
    """Report activation bytes on the device at the start of the backward pass, as in the test."""
    with tempfile.TemporaryDirectory() as folder:
        script = ROOT / "tests" / "offload_runs.py"
        paths = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        subprocess.run(
            [sys.executable, str(script), folder], env=paths, check=True, stdout=subprocess.DEVNULL
        )
        cases = torch.load(Path(folder, "found.pt"))
    held_bytes = {key: f"{case['held'] / 1e3:,.0f}" for key, case in cases.items()}
    return (
        "Activation offloading moves nothing on a CPU. With a smaller model on a device simulated "
        f"in Python, {held_bytes[False, True]} instead of {held_bytes[False, False]} KB of "
        "activations are on the device when the backward pass begins; with checkpointing, "
        f"{held_bytes[True, True]} instead of {held_bytes[True, False]} KB."
    )


def growth(peaks: dict[str, float]) -> str:
    """Report the peak of rows that are four times as long."""
    if not {"1,024 tokens", "4,096 tokens"} <= peaks.keys():
        return ""
    ratio = peaks["4,096 tokens"] / peaks["1,024 tokens"]
    return f"Rows of 4,096 tokens take {ratio:.2f}x what rows of 1,024 take (goal: 1.35x at most)."


def main() -> None:
    """Measure each case in its own process and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = [*CASES, *FEATURES]
    parser.add_argument("--case", choices=every)
    parser.add_argument("--only", nargs="*", default=every, choices=every)
    options = parser.parse_args()
    if options.case:
        preload()
        print(json.dumps(measure(options.case)))
        return
    lines = []
    features = []
    peaks = {}
    for name in options.only:
        process = subprocess.run(
            [sys.executable, __file__, "--case", name],
            stdout=subprocess.PIPE,
            check=True,
            text=True,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        )
        result = json.loads(process.stdout.splitlines()[-1])
        peaks[name] = result["peak"]
        if name in CASES:
            lines.append(row(name, result))
        else:
            features.append(feature_row(name, result, peaks.get("default", result["peak"])))
        print(name, result, flush=True)
    head = ["eight rows of", "0.22.2, MB", "1.16.0, MB", "ours, MB", "goal, MB", "positions", "s"]
    text = " ".join(__doc__.split("\n\n", 1)[1].split())
    PAGE.write_text(
        f"# Memory of supervised fine-tuning\n\nMade by `make bench-offline`. {text}\n\n"
        f"{markdown(head, lines)}\n\nPeaks are bytes above the start of `train()`, without the "
        "weights. The matrix of the vocabulary has one gradient, of 39 MB: those of embedding and "
        "head are added to it as they are computed. The rest is one chunk: 2,048 tokens by default "
        f"on a CPU, or one longer row. {growth(peaks)}\n\n"
        "The effect of options, measured in the same way with 8,192 entries, 12 layers of width "
        "128, and rows of lognormal lengths up to 1,024 tokens, or as many tokens as eight packs "
        "of that size hold:"
        f"\n\n{markdown(['option', 'MB', 'of default', 'positions'], features)}\n\n"
        f"{offloaded()} Liger's kernels for layers need Triton, and therefore a GPU. {divided()}\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
