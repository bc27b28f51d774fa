"""Under each engine, updates with every saving are those of one process without any."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from engines import ENGINES, SHARDED, launch
from savings_run import ADAPTERS, OFF, ON, ONCE, bases, run

SCRIPT = Path(__file__).with_name("savings_run.py")
GATHERED = "ds3_gather_for_generation"

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """What each engine made of each kind of policy."""
    folder = tmp_path_factory.mktemp("two")
    bases(folder)
    return launch(SCRIPT, "ddp", folder)[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process without savings: its micro-batches of 8 rows are 4 on each of two ranks."""
    folder = tmp_path_factory.mktemp("one")
    bases(folder)
    options = {"use_cpu": True, "per_device_train_batch_size": 8} | OFF
    return {
        (name, kind): run(name, folder, folder / kind / name, **options | changes)
        for name in ADAPTERS
        for kind, changes in {"at once": {}, "on-policy": ONCE}.items()
    }


def check(one, two, bound):
    assert two[1] == one[1]  # completions
    assert (one[0] - two[0]).norm() < bound * one[0].norm()


REUSED = "reuse_sampling_logps"
EVERY = ["training", "reference", "num_iterations", *(set(ON) - {REUSED})]
# FSDP1 divides no quantized weights, and peft restores no adapter under it.
CELLS = [(e, a) for e in ENGINES for a in ADAPTERS if (e, a) != ("fsdp1", "qlora")]
RESUMED = [cell for cell in CELLS if cell != ("fsdp1", "lora")]


@pytest.mark.covers(engine="$engine", saving=EVERY, adapter="$adapter")
@pytest.mark.parametrize(("engine", "adapter"), CELLS)
def test_savings_change_nothing(alone, on_two, engine, adapter):
    check(alone[adapter, "at once"], on_two[engine, adapter]["at once"], 5e-6)


@pytest.mark.covers(engine="$engine", saving=REUSED, adapter="$adapter")
@pytest.mark.parametrize(("engine", "adapter"), CELLS)
def test_the_log_probabilities_of_sampling_serve_again(alone, on_two, engine, adapter):
    check(alone[adapter, "on-policy"], on_two[engine, adapter]["on-policy"], 5e-6)


@pytest.mark.covers(engine="$engine", saving="resume", adapter="$adapter")
@pytest.mark.parametrize(("engine", "adapter"), RESUMED)
def test_a_run_resumed_within_a_round_ends_the_same(on_two, engine, adapter):
    found = on_two[engine, adapter]
    assert torch.equal(found["at once"][0], found["resumed"][0])
    assert found["at once"][1] == found["resumed"][1]


@pytest.mark.covers(
    engine="$engine", saving=[f"{GATHERED}=true", f"{GATHERED}=false"], adapter="$adapter"
)
@pytest.mark.parametrize(("engine", "adapter"), [c for c in CELLS if c[0] in SHARDED])
def test_one_layer_at_a_time_is_the_same(alone, on_two, engine, adapter):
    """It generates on-policy, where the log-probabilities of sampling serve again."""
    check(alone[adapter, "on-policy"], on_two[engine, adapter]["on-policy"], 5e-6)
    check(alone[adapter, "at once"], on_two[engine, adapter]["at once"], 5e-6)


@pytest.mark.covers(
    engine="fsdp1", saving="resume", adapter="lora", refused="peft reads wrapped modules one by one"
)
def test_an_adapter_is_not_restored_under_fsdp1(on_two):
    message = on_two["fsdp1", "lora"]["resumed"]
    assert "an adapter cannot be restored under FSDP1" in message and "fsdp2" in message


@pytest.mark.covers(
    engine="fsdp1",
    saving=[*EVERY, REUSED, "resume", f"{GATHERED}=true", f"{GATHERED}=false"],
    adapter="qlora",
    refused="FSDP1 shards floating-point weights only",
)
def test_quantized_weights_are_not_divided_by_fsdp1(on_two):
    for message in on_two["fsdp1", "qlora"].values():
        assert "FSDP1 cannot shard a base model in 4 bits" in message
