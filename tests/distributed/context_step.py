"""Updates on rows whose tokens two ranks divide: `context_step.py FOLDER RANKS ENGINE:CELL...`."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import preference_step
import sft_step
from accelerate import ParallelismConfig
from datasets import Dataset
from engines import finish, report, use
from sft_runs import make_trainer
from tensor_bytes import TensorBytes
from tiny import tiny_model

RECOMPUTED = {"gradient_checkpointing": True}
CELLS: dict[str, Any] = {
    "sft": partial(sft_step.run, "rows"),
    "sft, packs": partial(sft_step.run, "packs", **RECOMPUTED),
    "dpo": partial(preference_step.run, "dpo", **RECOMPUTED),
    "dpo, precomputed": partial(preference_step.run, "dpo, precomputed"),
    "kto": partial(preference_step.run, "kto"),
    "reward": partial(preference_step.run, "reward"),
}
LONG = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
LONG |= {"max_position_embeddings": 1024}
LENGTH, ROWS = 400, 4  # tokens of a row, and rows of a micro-batch


def peak(folder: Path, rows: int, accumulation: int, **options: Any) -> dict[str, Any]:
    """The most bytes of tensors that a rank has while it trains on long rows."""
    texts = [
        "".join(chr(97 + (7 * row + place) % 26) for place in range(LENGTH - 1))
        for row in range(2 * ROWS)
    ]
    model = tiny_model(**LONG)
    tracker = TensorBytes(model.parameters())
    trainer = make_trainer(
        folder,
        Dataset.from_dict({"text": texts}),
        model=model,
        per_device_train_batch_size=ROWS,
        max_steps=2,
        max_length=LENGTH,
        max_tokens_per_piece=0,
        optim="adamw_torch",
        **options,
    )
    with tracker:
        trainer.train()
    return {"peak": tracker.peak}


def main(folder: str, ranks: str, *cases: str) -> None:
    found: dict[str, Any] = {}
    shares = int(ranks) // 2  # of the rows
    for case in cases:
        engine, cell = case.split(":")
        use(engine)
        divided = ParallelismConfig(sp_size=2)
        if engine == "fsdp2":
            divided = ParallelismConfig(cp_size=2, dp_shard_size=shares)
        place, accumulation = Path(folder, engine, cell), 2 // shares
        run = CELLS.get(cell, peak)
        found[case] = run(place, 2, accumulation, use_cpu=False, parallelism_config=divided)
    report(found)
    finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
