"""Ranks that divide the tokens of rows among them learn what one process learns of whole rows."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from context_step import CELLS
from engines import launch

SCRIPT = Path(__file__).with_name("context_step.py")
LEFT_OUT = ("time", "runtime", "per_second", "epoch", "train_loss", "flos")
FOUR = ("sft, packs",)  # cells of two pairs of ranks
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    """What two ranks made of each cell, and four of some."""
    two, four = (tmp_path_factory.mktemp(name) for name in ("two", "four"))
    on_two = launch(SCRIPT, "fsdp2", two, 1, *CELLS)[0]
    on_four = launch(SCRIPT, "fsdp2", four, 2, *FOUR, processes=4)[0]
    return {(2, cell): x for cell, x in on_two.items()} | {(4, c): x for c, x in on_four.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return {cell: run(folder / cell, 2, 2) for cell, run in CELLS.items()}


@pytest.mark.parametrize(
    ("ranks", "cell"), [*((2, cell) for cell in CELLS), *((4, cell) for cell in FOUR)]
)
def test_dividing_rows_changes_nothing(alone, divided, ranks, cell):
    one, many = alone[cell], divided[ranks, cell]
    assert (one["weights"] - many["weights"]).norm() <= 1e-6 * one["weights"].norm()
    assert len(one["history"]) == len(many["history"]) > 3
    for a, b in zip(one["history"], many["history"], strict=True):
        for name in {x for x in a if not any(word in x for word in LEFT_OUT)}:
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=2e-5), name
    if cell == "reward":
        assert abs(one["predictions"] - many["predictions"]).max() <= 1e-5
