"""Updates with activations offloaded, under each engine in turn: `offloading_step.py FOLDER`.

The engines run on CPUs, whose tensors stay where they are otherwise: here they are moved, too.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from engines import ENGINES, finish, report, use
from same_runs import outcome
from sft_runs import PAIRS, make_trainer, pairs

from trl.models import activations

CELLS: dict[str, dict[str, Any]] = {
    "activations": {},
    "with checkpointing": {"gradient_checkpointing": True},
}


def run(cell: str, folder: Path, rows: int, offloads: bool, **changes: Any) -> dict[str, Any]:
    """Train a cell with `rows` in a micro-batch: what it did, and the shapes of what was moved."""
    trainer = make_trainer(
        folder,
        pairs(PAIRS),
        per_device_train_batch_size=rows,
        max_steps=2,
        eval_dataset=pairs(PAIRS[3:]),
        activation_offloading=offloads,
        max_tokens_per_piece=0,
        **(CELLS[cell] | changes),
    )
    moved = Counter[tuple[int, ...]]()
    if offloads:
        offloading = trainer.runner._offloading
        move = offloading._to_host

        def counted(tensor: Any) -> Any:
            moved[tuple(tensor.shape)] += 1
            return move(tensor)

        offloading._to_host = counted
    return outcome(trainer) | {"moved": moved}


def main(folder: str) -> None:
    activations.HOST = "none of the devices"
    found: dict[Any, Any] = {}
    for engine in ENGINES:
        for cell in CELLS:
            use(engine)
            place = Path(folder, engine, cell)
            found[engine, cell] = run(cell, place, 4, offloads=True, use_cpu=False)
    report(found)
    finish()


if __name__ == "__main__":
    main(sys.argv[1])
