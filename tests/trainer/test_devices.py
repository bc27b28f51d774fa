"""Training on an accelerator, which is pretended: see `pretend_device`."""

import math
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration
from workspace import run_forked

SCRIPT = Path(__file__).parents[1] / "device_runs.py"
CASES = ["shared prompts", "plain rows"]
UNLIKE = ("step_time", "runtime", "per_second")
pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no devices made in Python",
)

# What the host may wait for, by file and function: once for each decoded token, round, micro-batch,
# update or logged value. Nothing else, whatever the number of layers.
TOKEN = {"generation/transformers/shared_decoding.py _append": 1}
ROUND = {
    "distributed.py all": 1,
    "distributed.py _on_device": 3,
    "online/guard.py findings": 4,  # of two sets of log-probabilities, if they are finite and where
    "online/rewards.py __call__": 1,
    "online/reports.py add": 1,
    "online/reports.py records": 3,
    "trainer/online/rollout_batch.py rows_with_gradient": 1,
}
MICRO_BATCH = {
    "models/scorer.py _states": 2,  # transformers asks of plain rows whether a mask is all ones
}
UPDATE = {
    "trainer/base/base_trainer.py train": 2,  # loss and norm of the gradient, for the log
    "trainer/base/base_trainer.py _get_grad_norm": 1,
}
VALUE = {
    "online/metrics.py _number": 2,  # sum and weight, or a minimum or a maximum
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("devices")
    done = run_forked([SCRIPT, str(folder)], folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "found.pt")


def test_the_device_is_as_strict_as_a_gpu(found):
    assert found["probe"] == {
        "refused": ["in place", "index", "joined", "sum"],
        "before": 0,
        "counts": [1] * 9,
    }


@pytest.mark.parametrize("case", CASES)
def test_a_device_changes_nothing(found, case):
    """No tensor is in the wrong place, and all results are those of the host alone."""
    one, two = found[case, "cpu"], found[case, "pretend"]
    assert two["device"] == "pretend"
    assert (one["weights"] - two["weights"]).norm() < 2e-7 * one["weights"].norm()
    assert len(one["history"]) == len(two["history"]) == 4
    for a, b in zip(one["history"], two["history"], strict=True):
        assert set(a) == set(b)
        for name in (name for name in a if not any(part in name for part in UNLIKE)):
            same = a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6)
            assert same or (math.isnan(a[name]) and math.isnan(b[name])), name
    first, second = one["history"][:2]
    assert first["grad_norm"] > 0.1 and first["grad_norm"] != second["grad_norm"]


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_for_little(found, case):
    values = len(found[case, "pretend"]["history"][1])
    tokens, rounds = (6, 1) if case == "shared prompts" else (0, 0)  # the other round serves twice
    times = ((TOKEN, tokens), (ROUND, rounds), (MICRO_BATCH, 2), (UPDATE, 1), (VALUE, values))
    waits = found[case, "pretend"]["waits"]
    for place, count in waits.items():
        assert count <= sum(table.get(place, 0) * n for table, n in times), place
    if case == "shared prompts":
        assert waits["generation/transformers/shared_decoding.py _append"] == tokens
        assert "models/scorer.py _states" not in waits
