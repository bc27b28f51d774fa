"""Updates on preferences and an evaluation, under engines in turn: `preference_step.py FOLDER`."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import dpo_runs
import kto_runs
import numpy as np
import reward_runs
from engines import finish, report, use
from same_runs import outcome

ENGINES = ("ddp", "fsdp2", "zero2", "zero3")
# An odd number of rows: in the last round one rank has fewer, or none.
CELLS: dict[str, Any] = {
    "reward": (reward_runs.make_trainer, reward_runs.pairs(reward_runs.PAIRS[:5])),
    "kto": (kto_runs.make_trainer, kto_runs.labelled(kto_runs.ROWS[:7])),
    "kto, one forward": (kto_runs.make_trainer, kto_runs.labelled(kto_runs.ROWS[:7])),
    "dpo": (
        partial(dpo_runs.make_trainer, loss_type=["sigmoid", "aot_unpaired", "sft"]),
        dpo_runs.pairs(dpo_runs.PAIRS[:5]),
    ),
    "dpo, precomputed": (
        partial(dpo_runs.make_trainer, precompute_ref_log_probs=True),
        dpo_runs.pairs(dpo_runs.PAIRS[:5]),
    ),
}
SIZES = {"kto, one forward": (2, 1)}  # rows and micro-batches of a step on each of two ranks


def run(cell: str, folder: Path, rows: int, accumulation: int, **changes: Any) -> dict[str, Any]:
    """Train a cell with `rows` in a micro-batch; the first rank says what it did."""
    # Numbers of the reference that another engine has computed are not to be found.
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    make_trainer, data = CELLS[cell]
    trainer = make_trainer(
        folder,
        data,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        max_steps=3,
        learning_rate=0.01,
        eval_dataset=data,
        **changes,
    )
    found = outcome(trainer)
    found["predictions"] = trainer.predict(trainer.eval_dataset).predictions
    found["reference"] = [np.load(path) for path in folder.glob("cache/trl/reference-*.npy")]
    return found


def main(folder: str) -> None:
    found: dict[Any, Any] = {}
    for engine in ENGINES:
        for cell in CELLS:
            use(engine)
            sizes = SIZES.get(cell, (1, 2))
            found[engine, cell] = run(cell, Path(folder, engine, cell), *sizes, use_cpu=False)
    report(found)
    finish()


if __name__ == "__main__":
    main(sys.argv[1])
