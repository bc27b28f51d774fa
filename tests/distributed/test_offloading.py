"""Activations that wait on the host, under each engine: the updates of a run without that."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engines import ENGINES, launch
from offloading_step import CELLS, run
from same_runs import check_same

SCRIPT = Path(__file__).with_name("offloading_step.py")
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """What each engine made of each cell."""
    return launch(SCRIPT, "ddp", tmp_path_factory.mktemp("two"))[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process, where nothing is moved: its eight rows are four on each of two ranks."""
    folder = tmp_path_factory.mktemp("one")
    return {cell: run(cell, folder / cell, 8, offloads=False) for cell in CELLS}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cell", CELLS)
def test_offloading_changes_nothing(alone, on_two, engine, cell):
    check_same(alone[cell], on_two[engine, cell], ("loss", "eval_loss").__contains__, 0.0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cell", CELLS)
def test_engines_move_activations_and_no_weights(on_two, engine, cell):
    """Weights that they gather for a layer are not copied to the host, nor kept for the backward.

    Linear layers of ZeRO-3 save some activations twice; on some processors, others save flat ones.
    """
    moved = on_two[engine, cell]["moved"]
    expected = on_two["ddp", cell]["moved"]
    assert sizes(moved) == sizes(expected)
    assert len(expected) > 1
    assert moved == expected or engine == "zero3"


def sizes(shapes):
    """The shapes without dimensions of 1."""
    return {tuple(size for size in shape if size > 1) for shape in shapes}
