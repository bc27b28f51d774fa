"""One process, and two under each engine, train on the same documents in the same updates."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engines import ENGINES, launch
from same_runs import check_same
from sft_step import CELLS, run

SCRIPT = Path(__file__).with_name("sft_step.py")
SAME = ("loss", "entropy", "num_tokens", "learning_rate", "mean_logit")
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """What each engine made of each cell."""
    return launch(SCRIPT, "ddp", tmp_path_factory.mktemp("two"))[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Four micro-batches here are two on each of two ranks: the same rows."""
    folder = tmp_path_factory.mktemp("one")
    return {cell: run(cell, folder / cell, 2, 4) for cell in CELLS}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cell", CELLS)
def test_ranks_and_engines_change_nothing(alone, on_two, engine, cell):
    one, two = alone[cell], on_two[engine, cell]
    check_same(one, two, lambda name: name.removeprefix("eval_") in SAME, 0.0)
    assert one["history"][0]["num_tokens"] > 0
