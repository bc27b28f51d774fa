"""Runs killed at any instant end with the weights, completions and logs of one left alone."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("killed_runs.py")


def killed(folder, *words):
    """What differs, for each run that was killed and resumed."""
    command = [sys.executable, str(SCRIPT), str(folder), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
    try:
        shown, errors = process.communicate(timeout=280)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its forked runs too
        raise
    assert shown, errors[-3000:]
    return json.loads(shown.splitlines()[-1])


@pytest.mark.distributed
def test_one_process(tmp_path):
    """In a buffered round, in the next epoch, while saving, and between complete and named."""
    points = ["generate:4", "backward:8", "save:6", "seal:6", "rotate:9"]
    assert killed(tmp_path, "--at", *points) == {point: [] for point in points}


@pytest.mark.distributed
@pytest.mark.covers(engine="ddp", saving=["resume", "num_iterations"])
def test_two_processes(tmp_path):
    """The last rank dies, or while it saves its own state, and the launcher ends the other."""
    points = ["backward:5", "state:6"]
    assert killed(tmp_path, "--processes", "2", "--at", *points) == {point: [] for point in points}
