"""KTO: train on answers labeled as good or bad, and evaluate on held-out answers.

python examples/scripts/kto.py MODEL FOLDER [STEPS]   # such as HuggingFaceTB/SmolLM2-135M
"""

import itertools
import sys

from datasets import Dataset

from trl import KTOConfig, KTOTrainer

THINGS = ("a train", "the moon", "bread", "an old song", "rain", "my bicycle", "a fox", "chess")
GOOD = ("Gladly! Here is something about {}.", "Of course, {} is a fine subject.")
BAD = ("Look {} up yourself.", "Who cares about {}?")


def answers(things: tuple[str, ...]) -> Dataset:
    """Make a row of each answer about each thing, with its label."""
    labeled = [(text, True) for text in GOOD] + [(text, False) for text in BAD]
    rows = [
        {
            "prompt": f"Tell me about {thing}.\n",
            "completion": text.format(thing),
            "label": label,
        }
        for thing, (text, label) in itertools.product(things, labeled)
    ]
    return Dataset.from_list(rows)


def main(model: str, folder: str, steps: int) -> float:
    """Train, and return the margin between rewards of good and bad held-out answers."""
    args = KTOConfig(
        folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=5e-5,
        lr_scheduler_type="constant",
        logging_steps=5,
        bf16=False,
        report_to="none",
    )
    trainer = KTOTrainer(
        model, args=args, train_dataset=answers(THINGS[:6]), eval_dataset=answers(THINGS[6:])
    )
    trainer.train()
    margin = trainer.evaluate()["eval_rewards/margins"]
    trainer.save_model()
    print(f"held-out margin of rewards: {margin:.3f} after {steps} steps (0 before)")
    return margin


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 20)
