"""Adapters on two processes: the gradient of single rows, the reference, and resuming."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))

from adapter_run import (
    BROUGHT,
    CELLS,
    FOLLOWING,
    KIND_OF,
    NEW,
    PROMPTS,
    RATE,
    STILL,
    mixed,
)
from engines import ENGINES, launch
from kinds import KINDS, distance, independent, rloo_gradient, same, trained
from online_runs import rows_of
from test_policies import slow_logps

SCRIPT = Path(__file__).with_name("adapter_run.py")
DIVIDING = ["zero3", "fsdp2"]
ADAPTERS = ["lora", "qlora"]
EXACT = 5e-6  # for 8 bits too: on a CPU bitsandbytes rounds nothing in training mode
# Engines with whole weights change nothing in a layer; here they are shown with some adapters.
WORKING = [(e, c) for e in DIVIDING for c in NEW] + [("zero3", "8-bit")]
ELSEWHERE = "FSDP1 shards the copy of an adapter differently than the adapter"
FLOATING = "FSDP1 shards floating-point weights only"
FOLLOWED = [(e, c) for e in ENGINES if e != "fsdp1" for c in BROUGHT]

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """For each cell, a folder with what ranks load; they would write it at the same time."""
    top = tmp_path_factory.mktemp("cells")
    for cell in {cell for cells in CELLS.values() for cell in cells}:
        (top / cell).mkdir()
        kind = KINDS.get(KIND_OF.get(cell, cell))
        if kind is not None and kind.bits is not None:
            kind.load(top / cell / "base")
        if cell in KIND_OF:
            if kind.bits is None:
                kind.base().save_pretrained(top / cell / "base")
            torch.manual_seed(0)
            model = independent(kind, top / cell, {})
            model.peft_config["default"].base_model_name_or_path = str(top / cell / "base")
            model.save_pretrained(top / cell / "adapter")
    return top


@pytest.fixture(scope="module")
def runs(folders):
    """What both ranks report of each engine and cell."""
    return launch(SCRIPT, "ddp", folders)


def near(first, second):
    """Whether log-probabilities are equal but for rounding.

    Weights that were gathered may lie at other addresses each time, where products round otherwise.
    """
    return first.shape == second.shape and (first - second).abs().max() < EXACT


def check_gradient(found, model):
    gradient = {name: (v - found["end"][name]) / RATE for name, v in found["start"].items()}
    assert distance(gradient, rloo_gradient(model, PROMPTS)) < EXACT
    assert found["base stays"]


@pytest.mark.covers(engine=DIVIDING, adapter=ADAPTERS)
@pytest.mark.parametrize(("engine", "cell"), WORKING)
def test_the_gradient_is_that_of_single_rows(runs, folders, engine, cell):
    first, second = (rank[engine, cell] for rank in runs)
    model = independent(KINDS[cell], folders / cell, first["start"])
    check_gradient(first, model)
    assert same(first["end"], second["end"]) and second["base stays"]


@pytest.mark.covers(engine=DIVIDING, saving="reference", adapter=ADAPTERS)
@pytest.mark.parametrize(("engine", "cell"), WORKING)
def test_the_reference_is_the_base_model(runs, folders, engine, cell):
    found = runs[0][engine, cell]
    model = independent(KINDS[cell], folders / cell, {})
    with model.disable_adapter():
        expected = slow_logps(model, rows_of(PROMPTS, 1))
    # 8 bits: bitsandbytes rounds what goes into each layer in evaluation mode.
    assert (found["reference"] - expected).abs().max() < (0.1 if cell == "8-bit" else 1e-5)
    assert near(found["reference"], found["reference at the end"])


@pytest.mark.covers(engine="fsdp1", saving="sync_ref_model", adapter="qlora", refused=FLOATING)
@pytest.mark.parametrize(
    ("engine", "cell", "bits"),
    [("fsdp1", "brought on 4 bits", 4), ("fsdp1", "8-bit", 8), ("fsdp2", "8-bit", 8)],
)
def test_quantized_weights_that_are_not_divided(runs, engine, cell, bits):
    for rank in runs:
        expected = f"{engine.upper()} cannot shard a base model in {bits} bits"
        assert rank[engine, cell].startswith(expected)


# --- An adapter that was brought ---


def scored(cell, folder, weights):
    return slow_logps(independent(KINDS[KIND_OF[cell]], folder, weights), rows_of(PROMPTS, 1))


def check_start(found, cell, folder):
    """What was stored is trained, with its gradient, and its copy is the reference."""
    kind = KINDS[KIND_OF[cell]]
    torch.manual_seed(0)
    stored = independent(kind, folder, {})
    assert same(found["start"], trained(stored))
    check_gradient(found, stored)
    assert (found["reference"] - scored(cell, folder, found["start"])).abs().max() < 1e-5


def test_a_copy_that_fsdp1_divides_otherwise(runs, folders):
    """It is the reference all the same; that it cannot follow is said."""
    found = runs[0]["fsdp1", STILL]
    check_start(found, STILL, folders / STILL)
    assert near(found["reference"], found["reference at the end"])


@pytest.mark.covers(engine="fsdp1", saving="sync_ref_model", adapter="lora", refused=ELSEWHERE)
def test_no_copy_follows_under_fsdp1(runs):
    for rank in runs:
        expected = "sync_ref_model=True: FSDP1 divides the copy of an adapter in another way"
        assert rank["fsdp1", "brought"].startswith(expected)


@pytest.mark.covers(engine="$engine", saving="sync_ref_model", adapter=ADAPTERS)
@pytest.mark.parametrize(("engine", "cell"), FOLLOWED)
def test_a_reference_follows_an_adapter_that_was_brought(runs, folders, engine, cell):
    """First its gradient, then reference <- 0.25 policy + 0.75 reference, factor by factor."""
    first, second = (rank[engine, cell] for rank in runs)
    folder = folders / cell
    check_start(first, cell, folder)
    share = FOLLOWING["ref_model_mixup_alpha"]
    blended = {n: torch.lerp(v, first["end"][n], share) for n, v in first["start"].items()}
    copies = {name.replace(".ref", ".default"): v for name, v in first["copy"].items()}
    assert copies.keys() == blended.keys()
    for name, value in blended.items():
        torch.testing.assert_close(copies[name], value)
    expected = scored(cell, folder, blended)
    assert (first["reference at the end"] - expected).abs().max() < 2e-5
    assert (first["reference at the end"] - first["reference"]).abs().max() > 1e-3
    for part in ("end", "copy"):
        assert same(first[part], second[part])


# --- The rest ---


@pytest.mark.covers(engine=DIVIDING, saving="resume", adapter="lora")
@pytest.mark.parametrize("engine", DIVIDING)
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(runs, engine):
    found = runs[0][engine, "resume"]
    assert found["steps"] == 2
    assert same(found["resumed"], found["at once"]["end"])
    assert not same(found["resumed"], found["at once"]["start"])
    assert near(found["reference"], found["at once"]["reference"])
    assert found["files"] == ["adapter_model.safetensors"]


@pytest.fixture(scope="module")
def mixed_alone(tmp_path_factory):
    """Two micro-batches on one process: those of the ranks."""
    return mixed(tmp_path_factory.mktemp("alone"), 8, accumulation=2)


def moved(found):
    return {name: v - found["end"][name] for name, v in found["start"].items()}


@pytest.mark.parametrize("engine", DIVIDING)
def test_the_routers_of_a_mixture_are_balanced(runs, mixed_alone, tmp_path, engine):
    found = runs[0][engine, "router"]
    assert distance(moved(found), moved(mixed_alone)) < EXACT
    assert same(found["end"], runs[1][engine, "router"]["end"])
