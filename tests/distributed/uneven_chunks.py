"""Updates of two ranks that cut their micro-batches differently: `uneven_chunks.py FOLDER`."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import kto_runs
import online_runs
import torch
from engines import finish, gathered, report, use

from trl.trainer.grpo_trainer import GRPOTrainer

SHORT = [("2+3=", "5", True), ("x", "yz", False)]
LONG = [
    ("a longer prompt than others, ", "and an answer to it", True),
    ("one two three four five six ", "seven", False),
]
# Micro-batches of two rows are dealt to the ranks in turn: in the second update it is the other
# rank that has the long ones.
CELLS: dict[str, Any] = {
    "KTO": partial(
        kto_runs.make_trainer,
        data=kto_runs.labelled([*SHORT, *LONG, *LONG[::-1], *SHORT[::-1]]),
        per_device_train_batch_size=2,
        beta=0.5,
    ),
    # Each rank has the four completions of a prompt.
    "GRPO, tokens of high entropy": partial(
        online_runs.make_trainer,
        kind=GRPOTrainer,
        data=online_runs.dataset(["ab", "a long prompt, " * 7, "another one, " * 7, "c"]),
        top_entropy_quantile=0.3,
        per_device_train_batch_size=4,
    ),
}
LIMITS = {"whole": 0, "cut": 80}  # tokens of a chunk


def run(cell: str, folder: Path, limit: int, **changes: Any) -> dict[str, Any]:
    """Train a cell: what the first rank logged, and how many chunks each rank computed."""
    trainer = CELLS[cell](
        folder=folder,
        gradient_accumulation_steps=1,
        max_steps=2,
        learning_rate=0.1,
        max_tokens_per_piece=limit,
        **changes,
    )
    chunks = [0, 0]  # of both updates
    compute_loss = trainer.compute_loss

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        chunks[trainer.state.global_step] += 1
        return compute_loss(*args, **options)

    trainer.compute_loss = counted
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {
        "weights": torch.cat([state[name].flatten() for name in sorted(state)]),
        "history": trainer.state.log_history,
        "chunks": gathered([chunks]),
    }


def main(folder: str) -> None:
    found: dict[Any, Any] = {}
    for cell in CELLS:
        for name, limit in LIMITS.items():
            use("ddp")
            found[cell, name] = run(cell, Path(folder, cell, name), limit, use_cpu=False)
    report(found)
    finish()


if __name__ == "__main__":
    main(sys.argv[1])
