"""Train a reward model to prefer polite answers, and evaluate it on held-out answers.

python examples/scripts/reward.py MODEL FOLDER [STEPS]   # such as HuggingFaceTB/SmolLM2-135M
"""

import itertools
import sys

from datasets import Dataset

from trl import RewardConfig, RewardTrainer

THINGS = ("a train", "the moon", "bread", "an old song", "rain", "my bicycle", "a fox", "chess")
POLITE = ("Gladly! Here is something about {}.", "Of course, {} is a fine subject.")
RUDE = ("Look {} up yourself.", "Who cares about {}?")


def pairs(things: tuple[str, ...]) -> Dataset:
    """Make a pair of each polite and each rude answer about each thing."""
    rows = [
        {
            "prompt": f"Tell me about {thing}.\n",
            "chosen": polite.format(thing),
            "rejected": rude.format(thing),
        }
        for thing, polite, rude in itertools.product(things, POLITE, RUDE)
    ]
    return Dataset.from_list(rows)


def main(model: str, folder: str, steps: int) -> float:
    """Train, and return the share of held-out pairs in which the polite answer has more reward."""
    args = RewardConfig(
        folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        logging_steps=5,
        bf16=False,
        report_to="none",
    )
    trainer = RewardTrainer(
        model, args=args, train_dataset=pairs(THINGS[:6]), eval_dataset=pairs(THINGS[6:])
    )
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    after = trainer.evaluate()["eval_accuracy"]
    trainer.save_model()
    print(f"held-out accuracy: {before:.2f} before, {after:.2f} after {steps} steps")
    return after


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 20)
