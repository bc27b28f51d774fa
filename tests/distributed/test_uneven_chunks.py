"""Ranks that cut their micro-batches into different numbers of chunks train as if none did."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engines import launch
from same_runs import check_same
from uneven_chunks import CELLS

SCRIPT = Path(__file__).with_name("uneven_chunks.py")
COMPARED = ("loss", "kl")
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """What two ranks made of each cell; ranks that wait for each other run out of time."""
    return launch(SCRIPT, "ddp", tmp_path_factory.mktemp("two"), timeout=200)[0]


@pytest.mark.parametrize("cell", CELLS)
def test_different_cuts_change_nothing(on_two, cell):
    whole, cut = on_two[cell, "whole"], on_two[cell, "cut"]
    assert whole["chunks"] == [[1, 1], [1, 1]]
    first, second = cut["chunks"]
    assert first[0] < second[0] and first[1] > second[1]
    check_same(whole, cut, COMPARED.__contains__, 1e-6)
