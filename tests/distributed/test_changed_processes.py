"""A run that goes on with another number of processes: exactly, or not at all."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from changed_run import CELLS
from engines import launch

SCRIPT = Path(__file__).with_name("changed_run.py")
LISTED = (
    "\n  - number of processes: 2 in the checkpoint, 1 now"
    "\n  - per_device_train_batch_size: 4 in the checkpoint, 8 now\n"
)

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By cell: what two processes made, and what one was told and made of their checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    two = launch(SCRIPT, "ddp", folder, 2)[0]
    one = launch(SCRIPT, "ddp", folder, 1, processes=1)[0]
    return {cell: (two[cell], *one[cell]) for cell in two}


@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_what_differs_is_listed(runs, cell):
    assert LISTED in runs[cell][1]


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_between_rounds_it_is_the_same_run(runs, engine):
    """Once accepted: the same rows in the same order, and the same weights."""
    two, _, one = runs[engine, "between"]
    assert len(two[1]) == 32 and one[1] == two[1]
    assert (one[0] - two[0]).norm() < 5e-6 * two[0].norm()


def test_within_a_round_its_prompts_are_answered_anew(runs):
    two, _, one = runs["ddp", "within"]
    assert one[1][:16] == two[1] and len(one[1]) == 32
    assert [prompt for prompt, _ in one[1][16:]] == [prompt for prompt, _ in two[1]]


def test_deepspeed_cannot_divide_its_states_anew(runs):
    _, refused, accepted = runs["zero3", "between"]
    assert "cannot split them anew: resume with --num_processes 2, or begin" in accepted
    assert LISTED in accepted and "resume_with_changes" not in refused
