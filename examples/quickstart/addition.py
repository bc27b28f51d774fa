"""Few-shot addition of single digits: prompts, data files and reward."""

import json
import random
from pathlib import Path

SHOTS = "2+3=5\n4+1=5\n7+2=9\n"
TRAIN_PAIRS = 57
NOTE = (
    "About half of the rise of sampled accuracy is sharpening: the policy stops drawing tokens it "
    "already held unlikely. What lies above greedy before is learned."
)


def pairs() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All 81 pairs of digits 1 to 9, split once into disjoint training and held-out pairs."""
    every = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(0).shuffle(every)
    return every[:TRAIN_PAIRS], every[TRAIN_PAIRS:]


def row(a: int, b: int) -> dict[str, str]:
    """One dataset row; the reward function receives `answer` as a column."""
    return {"prompt": f"{SHOTS}{a}+{b}=", "answer": str(a + b)}


def write(folder: Path) -> None:
    """Write `train.jsonl` and `test.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, split in zip(("train", "test"), pairs(), strict=True):
        lines = [json.dumps(row(a, b)) for a, b in split]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def exact_sum(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """1 if the first line of the completion is the sum, else 0."""
    written = [text.split("\n")[0].strip() for text in completions]
    return [float(text == right) for text, right in zip(written, answer, strict=True)]
