"""Runs for another number of processes to go on with; `changed_run.py FOLDER`, run by `engines`.

On two processes it writes checkpoints, on one it resumes them, with and without leave to.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from engines import finish, report, use
from savings_run import OFF
from savings_run import run as train

# A checkpoint after one of two updates is within the round, or between two.
MOMENTS = {"within": {"num_iterations": 2}, "between": {"num_iterations": 1}}
CELLS = [(e, "between") for e in ("ddp", "fsdp1", "fsdp2", "zero3")] + [("ddp", "within")]
ROWS = 8  # of a micro-batch, over all processes


def run(engine: str, moment: str, folder: Path, processes: int, **changes: Any) -> Any:
    """Weights and rows of a run; the message if it is refused."""
    use(engine)
    options = {
        "use_cpu": False,
        "per_device_train_batch_size": ROWS // processes,
        "max_steps": 2,
        "saves": processes > 1,
    }
    try:
        found = train("none", folder, folder, **OFF | options | MOMENTS[moment] | changes)
    except ValueError as error:
        return str(error)
    if found is None:
        return None
    records = map(json.loads, (folder / "completions" / "train.jsonl").read_text().splitlines())
    return found[0], [(record["prompt"], record["completion_ids"]) for record in records]


def resumed(engine: str, moment: str, folder: Path, **changes: Any) -> Any:
    """As `run`, from a copy of the checkpoint of two processes."""
    copy = folder.with_name(f"{folder.name} {len(changes)}")
    shutil.copytree(folder, copy)
    return run(engine, moment, copy, 1, resume=True, **changes)


def main(folder: Path, processes: int) -> None:
    """What each cell comes to: a run; or what is said first, and the run once that is accepted."""
    found = {}
    for engine, moment in CELLS:
        place = folder / f"{engine} {moment}"
        if processes > 1:
            found[engine, moment] = run(engine, moment, place, processes)
        else:
            refused = resumed(engine, moment, place)
            found[engine, moment] = (
                refused,
                resumed(engine, moment, place, resume_with_changes=True),
            )
    report(found)
    finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
