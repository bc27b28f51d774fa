"""A reference that follows the policy is saved by one rank, which alone holds all of it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engines import launch
from moving_reference import ENGINES

SCRIPT = Path(__file__).with_name("moving_reference.py")
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """What each of two ranks held and read under each engine."""
    return launch(SCRIPT, "ddp", tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_rank_that_writes_holds_all_weights_and_the_other_does_not(on_two, engine):
    first, second = (rank[engine] for rank in on_two)
    assert first["same"] and second["same"], "what was written is read"
    assert first["written"] - second["written"] > 0.9 * first["all"]
