"""The table of engines says what tests say."""

import importlib.util
import sys

import pytest
from workspace import ROOT, run_forked

SCRIPT = ROOT / "scripts" / "engine_table.py"


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("engine_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["engine_table"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["engine_table"]


@pytest.mark.slow
def test_the_page_is_up_to_date():
    done = run_forked([SCRIPT, "--check"], ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_cells_of_a_marker(table):
    assert table.cells_of({"engine": "ddp"}, {}) == [("ddp", "training", "none")]
    found = table.cells_of(
        {"engine": "$engine", "saving": ["reference", "$what"], "adapter": ["none", "lora"]},
        {"engine": "zero3", "what": "resume"},
    )
    assert set(found) == {
        ("zero3", saving, adapter)
        for saving in ("reference", "resume")
        for adapter in ("none", "lora")
    }


@pytest.mark.parametrize(
    ("marked", "words"),
    [
        ({"engine": "zero4"}, r"covers\(engine='zero4'\): choose from ddp, zero1"),
        ({"engine": "ddp", "saving": "time"}, "saving='time'"),
        ({"saving": "reference"}, "it takes engine"),
        ({"engine": "ddp", "savings": "reference"}, "it takes engine"),
    ],
)
def test_markers_are_checked(table, marked, words):
    with pytest.raises(ValueError, match=words):
        table.cells_of(marked, {})


def row(text, name):
    return next(line.split(" | ") for line in text.splitlines() if f"{name}" in line)


def test_the_page_shows_what_works_and_what_is_refused(table):
    proofs = [
        table.Proof("tests/a.py::one", (("zero3", "reference", "none"),)),
        table.Proof("tests/b.py::two", (("fsdp1", "reference", "none"),), "because"),
    ]
    text = table.page(proofs)
    engines = table.AXES["engine"]
    cells = row(text, "`reference`")[1:]
    assert cells[engines.index("zero3")] == "yes"
    assert cells[engines.index("fsdp1")] == "refused (1)"
    assert cells[engines.index("ddp")] == "-"
    assert "1. because" in text
    assert row(text, "tests/b.py::two")[1:3] == ["fsdp1", "reference"]


def test_contradictions_are_errors(table):
    cell = (("ddp", "training", "none"),)
    with pytest.raises(ValueError, match="to work and to be refused"):
        table.page([table.Proof("a", cell), table.Proof("b", cell, "why")])
