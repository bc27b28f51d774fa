"""Copying four digits: a task for a tiny model that starts from random weights."""

import json
import random
from pathlib import Path

LENGTH = 4
TRAIN_ROWS = 2048
TEST_ROWS = 128
NOTE = "The model started from random weights. A guessed digit is right with probability 0.1."


def row(digits: str) -> dict[str, str]:
    """Make one dataset row: the digits with a separator, and the digits that should follow."""
    return {"prompt": f"{digits}=", "answer": digits}


def write(folder: Path) -> None:
    """Write `train.jsonl` and `test.jsonl`, which have no row in common."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = random.Random(0).sample(range(10**LENGTH), TRAIN_ROWS + TEST_ROWS)
    rows = [json.dumps(row(f"{number:0{LENGTH}d}")) for number in numbers]
    (folder / "train.jsonl").write_text("\n".join(rows[:TRAIN_ROWS]) + "\n")
    (folder / "test.jsonl").write_text("\n".join(rows[TRAIN_ROWS:]) + "\n")


def right_digits(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """Reward the share of positions with the right digit."""
    rewards = []
    for text, digits in zip(completions, answer, strict=True):
        matches = [written == digit for written, digit in zip(text, digits, strict=False)]
        rewards.append(sum(matches) / len(digits))
    return rewards
