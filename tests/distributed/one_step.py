"""One RLOO step on however many processes run this; writes the gradient it used.

accelerate launch --multi_gpu --num_processes 2 one_step.py OUT ROWS GROUP BETA
"""

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "trainer")]

from online import dataset, make_trainer, weights  # noqa: E402

MANY = [f"{chr(97 + i)}{i}" for i in range(8)]


def main(folder: str, rows: int, group: int, beta: float) -> None:
    trainer = make_trainer(
        folder,
        script=None,
        data=dataset(MANY),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=2,
        num_generations=group,
        shuffle_dataset=True,
        beta=beta,
        max_steps=2,
        eval_dataset=dataset(MANY),
        per_device_eval_batch_size=rows,
    )
    if trainer.reference is not None:
        with torch.no_grad():
            for parameter in trainer.reference.model.parameters():
                parameter.mul_(0.9)
    before = weights(trainer.model)
    trainer.train()
    trainer.evaluate()
    if trainer.is_world_process_zero():
        moved = (before - weights(trainer.model)) / trainer.args.learning_rate
        history = trainer.state.log_history
        torch.save({"moved": moved, "history": history}, Path(folder) / "step.pt")


if __name__ == "__main__":
    out, rows, group, beta = sys.argv[1:]
    main(out, int(rows), int(group), float(beta))
