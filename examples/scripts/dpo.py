"""DPO: train on pairs of a preferred and a rejected answer, and evaluate on held-out pairs.

python examples/scripts/dpo.py MODEL FOLDER [STEPS]   # such as HuggingFaceTB/SmolLM2-135M
"""

import sys

from datasets import Dataset

from trl import DPOConfig, DPOTrainer

COLORS = ("red", "blue", "green", "yellow", "black", "white", "brown", "orange")
THINGS = ("car", "house", "tree", "shoe", "cup", "door", "lamp", "bird")


def pairs(things: tuple[str, ...]) -> Dataset:
    """Make pairs of the same answer as a list, which is preferred, and as a sentence."""
    rows = [
        {
            "prompt": f"What do you see? A {color} {thing}.\n",
            "chosen": f"- color: {color}\n- thing: {thing}",
            "rejected": f"I see a {thing}. It is {color}.",
        }
        for color in COLORS
        for thing in things
    ]
    return Dataset.from_list(rows)


def main(model: str, folder: str, steps: int) -> float:
    """Train, and return the share of held-out pairs in which the list has the higher reward."""
    args = DPOConfig(
        folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=2e-5,
        lr_scheduler_type="constant",
        logging_steps=5,
        bf16=False,
        report_to="none",
    )
    trainer = DPOTrainer(
        model, args=args, train_dataset=pairs(THINGS[:6]), eval_dataset=pairs(THINGS[6:])
    )
    trainer.train()
    accuracy = trainer.evaluate()["eval_rewards/accuracies"]
    trainer.save_model()
    print(f"held-out pairs preferred: {accuracy:.3f} after {steps} steps (all are ties before)")
    return accuracy


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 20)
