"""The example programs learn what they are about, on a model from scratch."""

import pytest
from tiny import save_tiny
from workspace import ROOT

from examples.scripts import dpo, kto, reward

PROGRAMS = [(reward, 0.9), (kto, 0.05), (dpo, 0.9)]


@pytest.mark.parametrize(("program", "least"), PROGRAMS, ids=["reward", "kto", "dpo"])
def test_what_was_held_out_is_told_apart(tmp_path, program, least):
    name = save_tiny(tmp_path / "model", hidden_size=64, num_hidden_layers=1)
    assert program.main(name, str(tmp_path / "run"), 30) >= least


def test_they_are_short():
    for path in (ROOT / "examples" / "scripts").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path.name
