"""Copying four digits, for a tiny model that starts from random weights."""

import json
import random
from pathlib import Path

LENGTH = 4
TRAIN_ROWS, TEST_ROWS = 2048, 128
NOTE = "The model started from random weights; guessing gives each digit with a chance of 0.1."


def row(digits: str) -> dict[str, str]:
    """One dataset row: the digits, a separator, and what should follow."""
    return {"prompt": f"{digits}=", "answer": digits}


def write(folder: Path) -> None:
    """Write `train.jsonl` and `test.jsonl`; no string of digits is in both."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = random.Random(0).sample(range(10**LENGTH), TRAIN_ROWS + TEST_ROWS)
    rows = [json.dumps(row(f"{number:0{LENGTH}d}")) for number in numbers]
    (folder / "train.jsonl").write_text("\n".join(rows[:TRAIN_ROWS]) + "\n")
    (folder / "test.jsonl").write_text("\n".join(rows[TRAIN_ROWS:]) + "\n")


def right_digits(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """Share of places that hold the right digit."""
    return [
        sum(a == b for a, b in zip(text, right, strict=False)) / len(right)
        for text, right in zip(completions, answer, strict=True)
    ]
