"""Updates on rows whose tokens two ranks divide among them: `context_step.py FOLDER SIZE`."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import preference_step
import sft_step
from accelerate import ParallelismConfig
from engines import finish, report, use

RECOMPUTED = {"gradient_checkpointing": True}
CELLS: dict[str, Any] = {
    "sft": partial(sft_step.run, "rows"),
    "sft, packs": partial(sft_step.run, "packs", **RECOMPUTED),
    "dpo": partial(preference_step.run, "dpo", **RECOMPUTED),
    "dpo, precomputed": partial(preference_step.run, "dpo, precomputed"),
    "kto": partial(preference_step.run, "kto"),
    "reward": partial(preference_step.run, "reward"),
}


def main(folder: str, data_ranks: str, *cells: str) -> None:
    found: dict[str, Any] = {}
    ranks = int(data_ranks)
    for cell in cells:
        use("fsdp2")
        divided = ParallelismConfig(cp_size=2, dp_shard_size=ranks)
        place, accumulation = Path(folder, cell), 2 // ranks
        found[cell] = CELLS[cell](place, 2, accumulation, use_cpu=False, parallelism_config=divided)
        report(found)
    finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
