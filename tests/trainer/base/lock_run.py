"""Runs that share a folder: `lock_run.py train FOLDER NAME` or `lock_run.py race FOLDER NAME`.

`train` trains until the file NAME exists beside the folder. `race` takes the lock when `go` exists
there, and holds it until `stop` does. Whoever gets the lock leaves NAME.won.
"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

from online_runs import make_trainer, token_sum

from trl.distributed import Ranks
from trl.trainer.base.run_lock import RunLock


def wait_for(path):
    deadline = time.monotonic() + 300
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def train(folder, name):
    def waiting_reward(completion_ids, **kwargs):
        folder.with_name(f"{name}.won").touch()
        wait_for(folder.with_name(name))
        return token_sum(completion_ids)

    make_trainer(folder, reward=waiting_reward, max_steps=1, reward_dry_run=False).train()


def race(folder, name):
    wait_for(folder.with_name("go"))
    with RunLock(SimpleNamespace(output_dir=str(folder)), Ranks()):
        folder.with_name(f"{name}.won").touch()
        wait_for(folder.with_name("stop"))


if __name__ == "__main__":
    {"train": train, "race": race}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
