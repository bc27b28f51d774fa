"""Print the seconds until supervised fine-tuning begins, compared with other releases.

Texts of 300 words, a byte-level BPE tokenizer of 16,384 entries, default options, all cores.
"constructor" is that of the trainer on 2,000 rows, whose tokens no cache has; "one core" is the
same on 10,000 rows in one thread, and counts its own seconds; "first step" goes from the beginning
of the constructor to the end of the first update, on 100,000 rows: tokenized while training goes on
by this project, and all of them before it by others.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import environments
from transformers import TrainerCallback

ROOT = Path(__file__).resolve().parents[2]
ROWS = {"constructor": 2000, "one core": 10_000, "first step": 100_000}
PEERS = ("trl-0.22.2", "trl-1.16.0")
WORDS = 300


def vocabulary() -> list[str]:
    """Return the words of the standard library's source files."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]
    return " ".join(file.read_text(errors="ignore") for file in files).split(" ")


def tokenizer(texts: list[str]) -> Any:
    """Train a tokenizer on texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "eos_token": "<eos>"}
    trainer = trainers.BpeTrainer(vocab_size=16_384, special_tokens=list(names.values()))
    core.train_from_iterator([" ".join(texts)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


def measure(case: str, trainer: str) -> dict[str, float]:
    """Return seconds and processor seconds, measured in this process."""
    from datasets import Dataset, disable_progress_bars
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import trl

    disable_progress_bars()
    all_words = vocabulary()
    draw = random.Random(0)
    chosen = tokenizer(all_words)
    starts = [draw.randrange(len(all_words) - WORDS) for _ in range(ROWS[case] + 64)]
    texts = [" ".join(all_words[start : start + WORDS]) for start in starts]
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=16_384, **shape, **heads))
    options = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    options |= {"max_steps": 1, "disable_tqdm": True}
    lazy = {"lazy_tokenization": True} if case == "first step" and trainer == "this" else {}
    args = trl.SFTConfig(tempfile.mkdtemp(), **options, **lazy)

    few, rows = (Dataset.from_dict({"text": part}) for part in (texts[:64], texts[64:]))
    # What is imported once is no part of the constructor.
    trl.SFTTrainer(model, args, train_dataset=few, processing_class=chosen)
    before = now()
    trainer_to_measure = trl.SFTTrainer(model, args, train_dataset=rows, processing_class=chosen)
    after = now()
    if case == "first step":
        mark = Mark()
        trainer_to_measure.add_callback(mark)
        trainer_to_measure.train()
        after = mark.after
    names = ("seconds", "processor")
    return {name: b - a for name, a, b in zip(names, before, after, strict=True)}


def now() -> tuple[float, float]:
    """Return the wall-clock time, and the processor time including children."""
    return time.perf_counter(), sum(os.times()[:4])


class Mark(TrainerCallback):
    """Remembers when an update ended."""

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Remember the time."""
        self.after = now()


def run(case: str, trainer: str) -> dict[str, float]:
    """Measure in a separate process with its own cache."""
    paths = str(ROOT) if trainer == "this" else environments.site(trainer) or ""
    # Threads of the tokenizer are otherwise what users have who set nothing.
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    environment |= {"TOKENIZERS_PARALLELISM": "false"} if case == "one core" else {}
    with tempfile.TemporaryDirectory() as cache:
        process = subprocess.run(
            [environments.interpreter(trainer), __file__, "--case", case, "--trainer", trainer],
            stdout=subprocess.PIPE,
            check=True,
            text=True,
            env=environment | {"PYTHONPATH": paths, "HF_DATASETS_CACHE": cache},
        )
    return json.loads(process.stdout.splitlines()[-1])


def main() -> None:
    """Print a line per measurement, including peers whose environment is installed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=ROWS)
    parser.add_argument("--trainer", default="this", choices=("this", *PEERS))
    parser.add_argument("--only", nargs="*", default=list(ROWS), choices=ROWS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, options.trainer)))
        return
    peers = [peer for peer in PEERS if environments.site(peer) or environments.is_ready(peer)]
    for case in options.only:
        for trainer in ["this", *peers]:
            result = run(case, trainer)
            speed = ROWS[case] / result["processor" if case == "one core" else "seconds"]
            times = f"{result['seconds']:.2f} s, {result['processor']:.2f} s of processors"
            print(
                f"{case}, {ROWS[case]:,} rows, {trainer}: {times}, {speed:,.0f} rows/s", flush=True
            )
    if missing := sorted({*PEERS} - {*peers}):
        print(f"Not installed: python scripts/bench/environments.py {' '.join(missing)}")


if __name__ == "__main__":
    main()
