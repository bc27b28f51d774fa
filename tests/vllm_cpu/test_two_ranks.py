"""Two processes: an engine that both hold together, and weights that both divide."""

from pathlib import Path

import pytest
from distributed.engines import launch
from shared_vllm import needs_vllm, policy_model

pytestmark = [needs_vllm, pytest.mark.vllm, pytest.mark.distributed, pytest.mark.slow]
HERE = Path(__file__).parent
SHARED = Path("/dev/shm")
LEFT_OVER = "-tp:0-[0-1]-cpushm_{}"  # what vLLM calls the memory of two ranks


@pytest.fixture
def killed_run():
    """The shared memory that a run which was killed has left."""
    files = [SHARED / LEFT_OVER.format(rank) for rank in range(2)]
    for file in files:
        file.touch()
    yield
    assert not [file for file in SHARED.glob("*-cpushm_*") if file not in files], "left by this run"
    for file in files:
        file.unlink()


def test_two_ranks_hold_one_engine(killed_run):
    found = launch(HERE / "two_ranks.py", "ddp", vllm=True)
    for rank in found:
        assert max(step["gap"] for step in rank["steps"]) <= 1e-4
        assert rank["steps"][0]["ids"] != rank["steps"][1]["ids"]
    assert found[0]["steps"][0]["ids"][0] != found[1]["steps"][0]["ids"][0], "other seeds"
    whole = sum(p.numel() for p in policy_model().parameters())
    assert found[0]["entries"] < 0.7 * whole
    assert "self_attn.q_proj.weight differs from what was sent" in found[1]["error"]
    assert found[0]["error"].startswith("RankError: Rank 1 failed in sending weights to vLLM")


@pytest.mark.parametrize(("engine", "kind"), [("fsdp2", "whole"), ("zero3", "apart")])
def test_divided_weights_reach_the_engine(tmp_path, engine, kind):
    for found in launch(HERE / "sharded_run.py", engine, tmp_path, kind, vllm=True):
        assert len(found) == 2 and max(found) <= 1e-4
