"""One process and two give the same completions, advantages, gradients and metrics."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("one_step.py")


def run(folder: Path, processes: int, rows: int, group: int, beta: float):
    folder.mkdir()
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no"),
        *("--dynamo_backend", "no", "--main_process_port", "0"),
        *(("--multi_gpu",) if processes > 1 else ()),
        *(str(SCRIPT), str(folder), str(rows), str(group), str(beta)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (folder / "completions" / "train.jsonl").read_text().splitlines()
    evaluated = (folder / "completions" / "eval.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return records, [json.loads(line) for line in evaluated], torch.load(folder / "step.pt")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("group", "beta"), [(4, 0.0), (8, 0.1)], ids=["groups within ranks", "groups across ranks"]
)
def test_ranks_change_nothing(tmp_path, group, beta):
    alone, alone_eval, one = run(tmp_path / "one", 1, 8, group, beta)
    shared, shared_eval, two = run(tmp_path / "two", 2, 4, group, beta)
    for name in ("prompt", "completion_ids", "group", "reward", "step", "finish"):
        # Two micro-batches of 8 rows on one rank, or of 4 on each of two: the same 16 rows.
        assert [r[name] for r in alone] == [r[name] for r in shared], name
        assert [r[name] for r in alone_eval] == [r[name] for r in shared_eval], name
    pairs = zip(alone, shared, strict=True)
    assert all(abs(a["advantage"] - b["advantage"]) < 1e-5 for a, b in pairs)
    difference = (one["moved"] - two["moved"]).norm() / one["moved"].norm()
    assert difference < 5e-6
    for a, b in zip(one["history"], two["history"], strict=True):
        for name, value in a.items():
            if name in ("step_time", "epoch") or "runtime" in name or "per_second" in name:
                continue
            assert value == pytest.approx(b[name], rel=1e-4, abs=1e-5), name
