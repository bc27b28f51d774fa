"""Adapters on two processes that share the weights: the gradient of single rows, and resuming."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))

from adapter_run import PROMPTS, RATE
from engines import launch
from kinds import KINDS, distance, independent, rloo_gradient, same
from online import rows_of
from test_policies import slow_logps

SCRIPT = Path(__file__).with_name("adapter_run.py")
KIND_NAMES = ["lora", "dora", "head", "target_parameters", "modules_to_save", "4-bit"]
ENGINES = ["zero3", "fsdp2"]
ADAPTERS = ["lora", "qlora"]

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What the first rank reports, by engine and kind; each engine is started once."""
    known = {}

    def run(engine):
        if engine not in known:
            folder = tmp_path_factory.mktemp(engine)
            # Before the ranks start, which would write it at the same time.
            KINDS["4-bit"].load(folder / "4-bit" / "base")
            known[engine] = launch(SCRIPT, engine, folder, engine, *KIND_NAMES, timeout=240)
        return known[engine]

    return run


@pytest.mark.covers(engine=ENGINES, adapter=ADAPTERS)
@pytest.mark.parametrize("kind", KIND_NAMES)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_gradient_is_that_of_single_rows(runs, tmp_path, engine, kind):
    first, second = (rank[kind] for rank in runs(engine))
    gradient = {name: (v - first["end"][name]) / RATE for name, v in first["start"].items()}
    model = independent(KINDS[kind], tmp_path, first["start"])
    assert distance(gradient, rloo_gradient(model, PROMPTS)) < KINDS[kind].bound
    assert same(first["end"], second["end"])
    assert first["base stays"] and second["base stays"]


@pytest.mark.covers(engine=ENGINES, saving="reference", adapter=ADAPTERS)
@pytest.mark.parametrize("kind", KIND_NAMES)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_reference_is_the_base_model(runs, tmp_path, engine, kind):
    found = runs(engine)[0][kind]
    model = independent(KINDS[kind], tmp_path, {})
    with model.disable_adapter():
        expected = slow_logps(model, rows_of(PROMPTS, 1))
    assert (found["reference"] - expected).abs().max() < 1e-5
    assert found["reference stays"]


@pytest.mark.covers(engine=ENGINES, saving="resume", adapter="lora")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(runs, engine):
    found = runs(engine)[0]["resume"]
    assert found["steps"] == 2
    assert same(found["resumed"], found["at once"]["end"])
    assert not same(found["resumed"], found["at once"]["start"])
    assert torch.equal(found["reference"], found["at once"]["reference"])
    assert found["files"] == ["adapter_model.safetensors"]
