"""A process killed in the middle of an update, and the run that continues after it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from online import weights

sys.path.insert(0, str(Path(__file__).parent))

from endless_run import LAST, digit_sum, trainer_in

SCRIPT = Path(__file__).with_name("endless_run.py")


def completions(folder):
    """What was written, without the name of the reward function."""
    with (folder / "completions" / "train.jsonl").open() as file:
        records = [json.loads(line) for line in file if line.endswith("}\n")]
    return [{k: v for k, v in record.items() if k != "rewards"} for record in records]


@pytest.mark.distributed
def test_continues_at_the_same_step_with_the_same_data(tmp_path):
    whole = trainer_in(tmp_path / "whole", digit_sum)
    whole.train()

    killed = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, str(SCRIPT), str(killed)])
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        file = killed / "completions" / "train.jsonl"
        if file.exists() and any(record["step"] == 4 for record in completions(killed)):
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    assert [path.name for path in killed.glob("checkpoint-*")] == ["checkpoint-3"]

    resumed = trainer_in(killed, digit_sum)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == LAST
    assert completions(killed) == completions(tmp_path / "whole")
    assert torch.equal(weights(resumed.model), weights(whole.model))
