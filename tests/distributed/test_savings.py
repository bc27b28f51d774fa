"""Under each engine, updates with every saving are those of one process without any."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engines import ENGINES, launch
from one_step import run
from savings_run import BOTH, CELLS, OFF, ON

SCRIPT = Path(__file__).with_name("savings_run.py")


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """What each engine made of each kind of policy."""
    return launch(SCRIPT, "ddp", tmp_path_factory.mktemp("two"), timeout=280)[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process without savings: its micro-batches of 8 rows are 4 on each of two ranks."""
    folder = tmp_path_factory.mktemp("one")
    return {
        adapter: run(cell, folder / adapter, 8, use_cpu=True, **OFF, **BOTH)
        for adapter, cell in CELLS.items()
    }


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.covers(engine="$engine", saving=[*ON, "num_iterations"], adapter="$adapter")
@pytest.mark.parametrize("adapter", CELLS)
@pytest.mark.parametrize("engine", ENGINES)
def test_savings_change_nothing(alone, on_two, engine, adapter):
    one, two = alone[adapter], on_two[engine, adapter]
    for name in ("completion_ids", "reward", "step"):
        assert [r[name] for r in one["train"]] == [r[name] for r in two["train"]], name
    difference = (one["weights"] - two["weights"]).norm() / one["weights"].norm()
    assert difference < 2e-6
