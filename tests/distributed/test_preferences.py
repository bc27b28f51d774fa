"""One process, and two under several engines, train on the same preferences in the same updates."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engines import launch
from preference_step import CELLS, ENGINES, run
from same_runs import check_same

SCRIPT = Path(__file__).with_name("preference_step.py")
LEFT_OUT = ("time", "runtime", "per_second", "grad_norm", "epoch", "train_loss", "flos")
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """What each engine made of each cell."""
    return launch(SCRIPT, "ddp", tmp_path_factory.mktemp("two"))[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Four rows here, one at a time, are two on each of two ranks: the same rows."""
    folder = tmp_path_factory.mktemp("one")
    return {cell: run(cell, folder / cell, 1, 4) for cell in CELLS}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cell", CELLS)
def test_ranks_and_engines_change_nothing(alone, on_two, engine, cell):
    """Estimates and metrics are over all ranks; no row is lost or counted twice."""
    one, two = alone[cell], on_two[engine, cell]
    check_same(one, two, lambda name: not any(word in name for word in LEFT_OUT), 2e-5)
    if cell == "reward":
        assert two["predictions"].shape == (5, 2)
        assert two["predictions"] == pytest.approx(one["predictions"], rel=5e-6, abs=2e-5)
    if cell == "dpo, precomputed":  # the training set is evaluated, too
        (ours,), (theirs,) = one["reference"], two["reference"]
        assert ours.shape == (5, 2) and abs(ours - theirs).max() <= 1e-4
