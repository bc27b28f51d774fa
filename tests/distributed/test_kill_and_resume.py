"""Runs killed at any instant end with the weights, completions and logs of one left alone."""

import json
from pathlib import Path

import pytest
from workspace import run_forked

SCRIPT = Path(__file__).with_name("killed_runs.py")


def killed(folder, *words):
    """What differs, for each run that was killed and resumed."""
    done = run_forked([SCRIPT, folder, *words], folder)
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.distributed
def test_one_process(tmp_path):
    """In a buffered round, in the next epoch, while saving, and between complete and named."""
    points = ["generate:4", "backward:8", "save:6", "seal:6", "rotate:9"]
    assert killed(tmp_path, "--at", *points) == {point: [] for point in points}


@pytest.mark.distributed
@pytest.mark.parametrize("trainer", ["online-dpo", "ppo", "dpo", "kto"])
def test_other_trainers(tmp_path, trainer):
    """Values, references, the order of rows and the optimizer's state of all models come back."""
    points = ["backward:7", "save:6"]
    found = killed(tmp_path, "--trainer", trainer, "--at", *points)
    assert found == {point: [] for point in points}


@pytest.mark.distributed
@pytest.mark.covers(engine="ddp", saving=["resume", "num_iterations"])
def test_two_processes(tmp_path):
    """The last rank dies, or while it saves its own state, and the launcher ends the other."""
    points = ["backward:5", "state:6"]
    assert killed(tmp_path, "--processes", "2", "--at", *points) == {point: [] for point in points}
