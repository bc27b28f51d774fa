"""Few-shot addition of single digits: prompts, data files and reward."""

import json
import random
from pathlib import Path

SHOTS = "2+3=5\n4+1=5\n7+2=9\n"
TRAIN_PAIRS = 57
NOTE = (
    "About half of the gain in sampled answers is sharpening: the policy stops drawing tokens that "
    "it already considered unlikely. What exceeds the greedy accuracy before training was learned."
)


def pairs() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Split all 81 pairs of digits from 1 to 9 into training pairs and held-out pairs."""
    all_pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(0).shuffle(all_pairs)
    return all_pairs[:TRAIN_PAIRS], all_pairs[TRAIN_PAIRS:]


def row(a: int, b: int) -> dict[str, str]:
    """Make one dataset row. The reward function receives the column `answer`."""
    return {"prompt": f"{SHOTS}{a}+{b}=", "answer": str(a + b)}


def write(folder: Path) -> None:
    """Write `train.jsonl` and `test.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, split in zip(("train", "test"), pairs(), strict=True):
        lines = [json.dumps(row(a, b)) for a, b in split]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def exact_sum(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """Reward 1 if the first line of a completion is the sum, else 0."""
    first_lines = [text.split("\n")[0].strip() for text in completions]
    return [float(line == total) for line, total in zip(first_lines, answer, strict=True)]
