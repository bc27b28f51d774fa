"""Updates with savings that `one_step` leaves off, under each engine: `savings_run.py FOLDER`."""

import sys
from pathlib import Path
from typing import Any

from engines import ENGINES, finish, report, use
from one_step import run

CELLS = {"none": "reference", "lora": "lora"}
ON: dict[str, Any] = {
    "generation_max_rows": 3,
    "gradient_checkpointing": True,
    "reuse_sampling_logps": True,
}
OFF: dict[str, Any] = {
    "generation_max_rows": None,
    "gradient_checkpointing": False,
    "reuse_sampling_logps": False,
    "shared_prefix": False,
    "logits_chunk_size": 0,
    "skip_zero_advantages": False,
}
BOTH = {"num_iterations": 2}  # both updates of a round


def main(folder: str) -> None:
    """Train each kind of policy under each engine."""
    found = {}
    for engine in ENGINES:
        for adapter, cell in CELLS.items():
            use(engine)
            place = Path(folder, engine, adapter)
            found[engine, adapter] = run(cell, place, 4, use_cpu=False, **ON, **BOTH)
            report(found)
    finish()


if __name__ == "__main__":
    main(sys.argv[1])
