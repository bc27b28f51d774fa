"""Trains until it is killed: `endless_run.py OUT`. The settings are those of its test."""

import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "trainer")]

from online import dataset, make_trainer  # noqa: E402

MANY = [f"{chr(97 + i)}{i}" for i in range(10)]
LAST = 7


def digit_sum(completion_ids, **kwargs):
    """A reward that differs between completions."""
    return [(sum(ids) % 13) / 3 for ids in completion_ids]


def slow_digit_sum(completion_ids, **kwargs):
    """The same, slowly enough to be interrupted at a known step."""
    time.sleep(0.4)
    return digit_sum(completion_ids)


def trainer_in(folder, reward):
    """Two epochs of five updates, sampled completions, Adam, a checkpoint at update 3 and 6."""
    return make_trainer(
        folder,
        reward=reward,
        script=None,
        data=dataset(MANY),
        shuffle_dataset=True,
        optim="adamw_torch",
        learning_rate=0.01,
        save_strategy="steps",
        save_steps=3,
        max_steps=LAST,
        beta=0.05,
    )


if __name__ == "__main__":
    trainer_in(sys.argv[1], slow_digit_sum).train()
