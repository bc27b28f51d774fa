"""Peak memory, positions and processor time of an update of DPO, KTO and reward models.

A random Qwen3 (hidden 64, 2 layers, 151,936 entries, tied), float32, SGD, eight pairs or rows in
one micro-batch with chunks of the default size, one thread. Megabytes of Hugging Face's releases
were measured on the same work, with the same kind of meter, on 22 November 2026 (1.16.0 by its GPU
path, with its head kernels imitated), and are not measured again here. Seconds are measured in the
same run.
"""

from __future__ import annotations

import copy
import json
import os
import random
import string
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from statistics import median
from typing import Any

import environments
import torch
from meter import ROOT, CpuBytes, preload
from offline import VOCABULARY, lengths
from tables import markdown

PAGE = ROOT / "docs" / "benchmarks" / "preferences.md"
# method, tokens of prompt and answer: megabytes of 0.20.0, 0.22.2, 1.16.0, and 1.16.0 a row at a
# time; the goals of megabytes and of fewer positions; positions of 1.16.0, padding included.
CASES: dict[tuple[str, int, int], tuple[str, str, str, str, int, float, int]] = {
    ("DPO", 512, 256): ("22,600", "3,990 (liger)", "593", "150", 75, 1.5, 24_576),
    ("DPO", 1024, 256): ("", "7,520", "602", "", 75, 1.5, 40_960),
    ("DPO", 3100, 53): ("", "1,629", "534", "142", 90, 1.95, 100_896),
    ("KTO", 512, 256): ("15,050", "3,080 (liger)", "317", "150", 70, 1.5, 24_576),
    ("KTO", 3100, 53): ("", "61,400", "288", "142", 85, 1.95, 100_896),
    ("KTO, whole", 512, 256): ("15,050", "3,080 (liger)", "317", "150", 70, 1.5, 24_576),
    ("KTO, whole", 3100, 53): ("", "61,400", "288", "142", 85, 1.95, 100_896),
    ("Reward", 512, 256): ("219", "100", "121", "", 70, 1.5, 12_288),
    ("Reward", 3100, 53): ("", "288", "495", "103", 85, 1.95, 50_448),
}
# SmolLM2's width, 6 of its layers, 16,384 entries, 512 tokens of prompt and 64 of an answer: the
# goal for our processor seconds over the peer's.
SECONDS = {"DPO": 0.62, "KTO": 0.75, "Reward": 0.62, "SFT": 0.70}
FEW = {"KTO": 2, "SFT": 4}  # rows of an update that is timed; one pair of the others
PEER = "trl-1.16.0"
ROUNDS = 3  # of one after the other
SMALL = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SMOL = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 6}
SMOL |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 16_384}


def make_trainer(method: str, sizes: tuple[int, int], rows: int, shape: dict[str, int]) -> Any:
    """Make a trainer on random characters. "METHOD, whole" does not split micro-batches."""
    import transformers
    from datasets import Dataset

    import trl
    import trl.trainer.utils
    from tests.tiny import tiny_tokenizer

    if hasattr(trl.trainer.utils, "_use_triton"):
        # The peer computes logits where there are labels alone, as it does on a GPU.
        trl.trainer.utils._use_triton = lambda device: True
    torch.set_num_threads(1)
    torch.manual_seed(0)
    method, _, is_whole = method.partition(", ")
    task = "SequenceClassification" if method == "Reward" else "CausalLM"
    family = "Qwen3" if shape is SMALL else "Llama"
    config = getattr(transformers, f"{family}Config")(
        **({"vocab_size": VOCABULARY} | shape), num_labels=1, pad_token_id=0
    )
    config.tie_word_embeddings = True
    model = getattr(transformers, f"{family}For{task}")(config)
    draw = random.Random(1)

    def text(size: int) -> str:
        return "".join(draw.choices(string.ascii_lowercase, k=size))

    # An answer and a text end with the token that trainers add.
    token_counts = {"prompt": sizes[0], "chosen": sizes[1] - 1, "rejected": sizes[1] - 1}
    if method == "KTO":
        token_counts = {"prompt": sizes[0], "completion": sizes[1] - 1}
    columns: dict[str, Any] = {
        name: [text(n) for _ in range(rows)] for name, n in token_counts.items()
    }
    if method == "KTO":
        columns["label"] = [bool(i % 2) for i in range(rows)]
    if method == "SFT":
        columns = {"text": [text(n - 1) for n in lengths(sizes[0], "lognormal", rows)]}
    # The first update also checks the layout of rows.
    settings = {
        "max_steps": 2 if shape is SMALL else 4,
        "optim": "sgd",
        "report_to": "none",
        "save_strategy": "no",
    }
    settings |= {"use_cpu": True, "bf16": False, "disable_tqdm": True}
    settings |= {"max_tokens_per_piece": 0} if is_whole else {}
    return getattr(trl, f"{method}Trainer")(
        model,
        **({"ref_model": copy.deepcopy(model)} if method in ("DPO", "KTO") else {}),
        args=getattr(trl, f"{method}Config")(tempfile.mkdtemp(), max_length=None, **settings),
        train_dataset=Dataset.from_dict(columns),
        processing_class=tiny_tokenizer(),
    )


def measure(method: str, prompt: int, answer: int, rows: int) -> dict[str, Any]:
    """Measure updates in this process: the peak, and positions and processor seconds of each."""
    from transformers import TrainerCallback

    shape = SMALL if rows != 0 else SMOL
    trainer = make_trainer(method, (prompt, answer), rows or FEW.get(method, 1), shape)
    seen: list[int] = []
    reference = getattr(trainer, "ref_model", None)
    for module in (trainer.model, *([] if reference is None else [reference])):
        # What is computed again in the backward pass is not counted: layers are called then.
        module.base_model.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append([*args, kwargs.get("input_ids")][0].numel()),
            with_kwargs=True,
        )
    positions: list[int] = []
    seconds: list[float] = [time.process_time()]

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            positions.append(sum(seen))
            seconds.append(time.process_time())
            seen.clear()

    trainer.add_callback(Watch())
    counter = CpuBytes()
    counter.reset()
    trainer.train()
    spent = [after - before for before, after in pairwise(seconds[1:])]
    return {"peak": counter.peak(), "positions": positions[-1], "seconds": median(spent)}


def run(method: str, prompt: int, answer: int, rows: int, trainer: str = "this") -> dict[str, Any]:
    """Run `measure` in its own process."""
    paths = [str(ROOT / "tests"), environments.site(trainer) or "", str(ROOT)]
    process = subprocess.run(
        [environments.interpreter(trainer), __file__, "--case", method]
        + [str(number) for number in (prompt, answer, rows)],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        env=os.environ | {"PYTHONPATH": ":".join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
    )
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def verdict(value: float, goal: float, holds: bool) -> str:
    """Format a goal, and whether it is reached."""
    return f"{goal:g}: {'holds' if holds else 'does not hold'}"


def memory_table() -> str:
    """Make the table of peaks and positions with eight rows and with one."""
    lines = []
    for (method, *sizes), (oldest, old, new, single, goal, fewer, theirs) in CASES.items():
        result, single_row = (
            run(method, *sizes, rows) for rows in (8, 2 if "KTO" in method else 1)
        )
        peak = result["peak"] / 1e6
        growth = result["peak"] / single_row["peak"]
        ratio = theirs / result["positions"]
        line = [f"{method}, {sizes[0]:,} / {sizes[1]}", oldest, old, new, single, f"{peak:.0f}"]
        line += [verdict(peak, goal, peak <= goal), f"{growth:.2f}"]
        line += [f"{result['positions']:,}", f"{ratio:.2f}x", verdict(ratio, fewer, ratio >= fewer)]
        lines.append(line)
        print(line, flush=True)
    head = ["prompt / answers", "0.20.0, MB", "0.22.2, MB", "1.16.0, MB", "row by row, MB"]
    head += ["ours, MB", "goal, MB", "8 rows / 1", "positions", "fewer", "goal"]
    return markdown(head, lines)


def time_table() -> str:
    """Make the table of processor seconds per update, with alternating runs of both trainers."""
    environments.make(PEER)
    lines = []
    for method, goal in SECONDS.items():
        rounds = [
            [run(method, 512, 64, 0, trainer)["seconds"] for trainer in (PEER, "this")]
            for _ in range(ROUNDS)
        ]
        theirs, ours = zip(*rounds, strict=True)
        ratio = median(ours) / median(theirs)
        line = [method, spread(theirs), spread(ours), f"{ratio:.2f}"]
        lines.append([*line, verdict(ratio, goal, ratio <= goal)])
        print(lines[-1], flush=True)
    return markdown(["", "1.16.0, s", "ours, s", "ours / 1.16.0", "goal"], lines)


def spread(values: tuple[float, ...]) -> str:
    """Format the median with the lowest and highest value."""
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def write_page() -> None:
    """Measure all cases and write the page."""
    text = " ".join(str(__doc__).split("\n\n", 1)[1].split())
    PAGE.write_text(
        "# Memory of DPO, KTO and reward models\n\nMade by `make bench-preferences`, a part of "
        f"`make bench-offline`. {text}\n\n{memory_table()}\n\nPeaks are bytes above the start of "
        "`train()`, without the weights of policy and reference. They include 39 MB for the "
        "gradient of the vocabulary's matrix, which a reward model computes in its last chunk. "
        "Positions are those that policy and reference compute in an update, padding included. KTO "
        "is compared with two rows, the smallest number in which each row has another answer. An "
        "update of KTO in several chunks must know the KL estimate before the first of them, so it "
        'computes prompts once more than with a whole micro-batch ("KTO, whole", '
        "`max_tokens_per_piece=0`). The default needs less memory; a whole micro-batch computes "
        "fewer positions.\n\n"
        "Processor seconds of an update of one pair (KTO: two rows), 512 tokens of prompt and 64 "
        "of each answer, or of four texts of lognormal lengths up to 512 (SFT), SmolLM2's width "
        "and 6 of its layers, 16,384 entries; both in turn, "
        f"{ROUNDS} times, medians with their range:\n\n{time_table()}\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        preload()
        case, *numbers = sys.argv[2:]
        print(json.dumps(measure(case, *map(int, numbers))))
    else:
        write_page()
