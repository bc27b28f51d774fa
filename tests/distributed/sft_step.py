"""Supervised updates and an evaluation, under each engine in turn: `sft_step.py FOLDER`."""

import sys
from pathlib import Path
from typing import Any

from engines import ENGINES, finish, report, use
from same_runs import outcome
from sft_runs import PAIRS, make_trainer, pairs


def mean_logit(prediction: Any) -> dict[str, float]:
    """Of what predicts a token that is trained on."""
    return {
        "mean_logit": float(prediction.predictions[:, :-1][prediction.label_ids[:, 1:] >= 0].mean())
    }


# Seven rows: in the last round one rank has fewer, or none.
CELLS: dict[str, dict[str, Any]] = {
    "rows": {},
    "packs": {"packing": True, "max_length": 40},
    "stream": {"stream": True, "compute_metrics": mean_logit},
}


def run(cell: str, folder: Path, rows: int, accumulation: int, **changes: Any) -> dict[str, Any]:
    """Train a cell with `rows` in a micro-batch; the first rank says what it did."""
    options = dict(CELLS[cell])
    data = pairs(PAIRS[:7])
    trainer = make_trainer(
        folder,
        data.to_iterable_dataset() if options.pop("stream", False) else data,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        max_steps=3,
        eval_dataset=pairs(PAIRS[3:]),
        **(options | changes),
    )
    return outcome(trainer)


def main(folder: str) -> None:
    found: dict[Any, Any] = {}
    for engine in ENGINES:
        for cell in CELLS:
            use(engine)
            found[engine, cell] = run(cell, Path(folder, engine, cell), 2, 2, use_cpu=False)
    report(found)
    finish()


if __name__ == "__main__":
    main(sys.argv[1])
