"""Ranks that divide the tokens of rows among them learn what one process learns of whole rows."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from context_step import CELLS, LENGTH, LONG, ROWS
from engines import launch
from tiny import tiny_model

from trl.memory.estimate import Estimate
from trl.memory.model_size import model_size
from trl.memory.settings import RunSettings, Sharding

SCRIPT = Path(__file__).with_name("context_step.py")
LEFT_OUT = ("time", "runtime", "per_second", "epoch", "train_loss", "flos")
# What two ranks, or two pairs of them, make of rows: by FSDP2 with cp_size, others with sp_size.
CASES: dict[int, list[str]] = {
    2: [
        *(f"fsdp2:{cell}" for cell in (*CELLS, "peak")),
        "zero2:dpo",
        "zero3:sft, packs",
        "ddp:kto",
    ],
    4: ["fsdp2:sft, packs"],
}
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    """What the ranks of each case made of its cells."""
    found = {}
    for ranks, cases in CASES.items():
        folder = tmp_path_factory.mktemp(f"{ranks}")
        each = launch(SCRIPT, "fsdp2", folder, ranks, *cases, processes=ranks)[0]
        found |= {(ranks, case): x for case, x in each.items()}
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return {cell: run(folder / cell, 2, 2) for cell, run in CELLS.items()}


@pytest.mark.parametrize(
    ("ranks", "case"),
    [(n, case) for n, cases in CASES.items() for case in cases if not case.endswith("peak")],
)
def test_dividing_rows_changes_nothing(alone, divided, ranks, case):
    cell = case.split(":")[1]
    one, many = alone[cell], divided[ranks, case]
    assert (one["weights"] - many["weights"]).norm() <= 1e-6 * one["weights"].norm()
    assert len(one["history"]) == len(many["history"]) > 3
    for a, b in zip(one["history"], many["history"], strict=True):
        for name in {x for x in a if not any(word in x for word in LEFT_OUT)}:
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=2e-5), name
    if cell == "reward":
        assert many["predictions"] == pytest.approx(one["predictions"], rel=5e-6, abs=2e-5)


def test_the_memory_plan_counts_a_share_of_the_tokens(divided):
    sharding = Sharding("fsdp2", 3, 2, per_row=2)
    run = RunSettings(1, 0, LENGTH, ROWS, generates=False, processes=2, sharding=sharding)
    run = run.replace(gradient_checkpointing=False, optimizer="adamw_torch", on_cpu=True)
    found = Estimate(model_size(tiny_model(**LONG).config), run)
    assert found.peak == pytest.approx(divided[2, "fsdp2:peak"]["peak"], rel=0.1)
