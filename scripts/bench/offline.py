"""Peak memory, positions and processor time of one update of SFT: docs/benchmarks/offline.md.

A random Qwen3 (hidden 64, 2 layers, 151,936 entries, tied), float32, SGD, eight rows or packs, one
thread. Figures of Hugging Face's releases are those that were measured on the same work, with the
same kind of meter, on 22 November 2026; they are not measured again here.
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
from typing import Any

import torch
from meter import ROOT, CpuBytes, preload
from tables import markdown

PAGE = ROOT / "docs" / "benchmarks" / "offline.md"
VOCABULARY = 151_936
PIECE = "max_tokens_per_piece"
# name: length, kind, options, megabytes of 0.22.2 and 1.16.0 (its GPU path), the goal
CASES: dict[str, tuple[int, str, dict[str, Any], str, str, int | None]] = {
    "1,024 tokens": (1024, "fixed", {}, "14,940", "591", 75),
    "lognormal, longest 1,024": (1024, "lognormal", {}, "14,950", "430", 75),
    "packs of 1,024": (1024, "pack", {"packing": True}, "22,530", "592", 75),
    "4,096 tokens": (4096, "fixed", {}, "59,770", "630", 90),
    "1,024 tokens, pieces of 1,024": (*(1024, "fixed"), {PIECE: 1024}, "14,940", "591", None),
    "1,024 tokens, pieces of 4,096": (*(1024, "fixed"), {PIECE: 4096}, "14,940", "591", None),
    "1,024 tokens, in one piece": (*(1024, "fixed"), {PIECE: 0}, "14,940", "591", None),
}


def lengths(length: int, kind: str, count: int = 8) -> list[int]:
    """Tokens of the documents of a case."""
    draw = random.Random(0)

    def one(median: int) -> int:
        return max(16, min(length, int(median * math.exp(draw.gauss(0, 0.8)))))

    if kind == "fixed":
        return [length] * count
    found: list[int] = []
    if kind == "lognormal":
        found = [one(length // 3) for _ in range(count)]
        return [length, *found[1:]]
    while sum(found) < (count - 0.1) * length:
        found.append(one(max(32, length // 8)))
    return found


def measure(name: str) -> dict[str, float]:
    """One update, in this process."""
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.tiny import tiny_tokenizer
    from trl import SFTConfig, SFTTrainer

    length, kind, options, *_ = CASES[name]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=VOCABULARY, **shape, **heads, tie_word_embeddings=True)
    )
    draw, sizes = random.Random(1), lengths(length, kind)
    rows = [[draw.randrange(2, VOCABULARY) for _ in range(size)] for size in sizes]
    settings = {"max_steps": 1, "optim": "sgd", "report_to": "none", "save_strategy": "no"}
    settings |= {"use_cpu": True, "bf16": False, "disable_tqdm": True, "log_memory": False}
    trainer = SFTTrainer(
        model,
        SFTConfig(tempfile.mkdtemp(), max_length=length, **settings, **options),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tiny_tokenizer(),
    )
    trainer.begin_training = lambda: None
    counter, started = CpuBytes(), time.process_time()
    counter.reset()
    trainer.train()
    return {
        "peak": counter.peak(),
        "positions": trainer.state.num_input_tokens_seen,
        "padded": max(sizes) * len(sizes),
        "seconds": time.process_time() - started,
    }


def row(name: str, found: dict[str, float]) -> list[str]:
    """A line of the table."""
    *_, old, new, goal = CASES[name]
    peak = found["peak"] / 1e6
    verdict = "" if goal is None else f"{goal}: {'holds' if peak <= goal else 'does not hold'}"
    fewer = f"{found['positions']:,.0f} ({found['padded'] / found['positions']:.2f}x fewer)"
    return [name, old, new, f"{peak:.0f}", verdict, fewer, f"{found['seconds']:.1f}"]


def growth(peaks: dict[str, float]) -> str:
    """What rows that are four times as long cost."""
    if not {"1,024 tokens", "4,096 tokens"} <= peaks.keys():
        return ""
    ratio = peaks["4,096 tokens"] / peaks["1,024 tokens"]
    return f"Rows of 4,096 tokens take {ratio:.2f}x what rows of 1,024 take (goal: 1.35x at most)."


def main() -> None:
    """Measure each case in its own process and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=CASES)
    options = parser.parse_args()
    if options.case:
        preload()
        print(json.dumps(measure(options.case)))
        return
    lines, peaks = [], {}
    for name in options.only:
        done = subprocess.run(
            [sys.executable, __file__, "--case", name],
            stdout=subprocess.PIPE,
            check=True,
            text=True,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        )
        found = json.loads(done.stdout.splitlines()[-1])
        peaks[name] = found["peak"]
        lines.append(row(name, found))
        print(lines[-1], flush=True)
    head = ["eight rows of", "0.22.2, MB", "1.16.0, MB", "ours, MB", "goal, MB", "positions", "s"]
    text = " ".join(__doc__.split("\n\n", 1)[1].split())
    PAGE.write_text(
        f"# Memory of supervised fine-tuning\n\nMade by `make bench-offline`. {text}\n\n"
        f"{markdown(head, lines)}\n\nPeaks are bytes above the start of `train()`, weights not "
        "counted. The matrix of the vocabulary has one gradient, of 39 MB: those of embedding and "
        "head are added to it as they arise. The rest is a piece: 2,048 tokens by default on a "
        f"CPU, or one longer row. {growth(peaks)}\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
