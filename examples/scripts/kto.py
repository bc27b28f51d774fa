"""Train on answers that were marked as good or bad, and measure it on others.

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
    """Every answer with its label."""
    labelled = [(text, True) for text in GOOD] + [(text, False) for text in BAD]
    rows = [
        {
            "prompt": f"Tell me about {thing}.\n",
            "completion": text.format(thing),
            "label": label,
        }
        for thing, (text, label) in itertools.product(things, labelled)
    ]
    return Dataset.from_list(rows)


def main(model: str, folder: str, steps: int) -> float:
    """Train, and return by how much held-out good answers are rewarded more than bad ones."""
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
