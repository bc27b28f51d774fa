"""Bytes a rank holds, against sums written out by hand for each engine.

`tests/distributed/test_held_bytes.py` compares them with what real engines hold.
"""

from dataclasses import replace

import pytest
from peft import LoraConfig
from tiny import tiny_model

from trl.memory.estimate import Estimate
from trl.memory.model_size import model_size
from trl.memory.rank_memory import MemoryUse, RankMemory
from trl.memory.settings import RunSettings, Sharding

SIZE = model_size(tiny_model("llama").config)
N = SIZE.parameters
R = 4
HALF = {"weight_bytes": 2, "product_bytes": 2, "loaded_bytes": 4}


def run(engine, stage=0, half=True, **changes):
    fields = {"group_size": 4, "prompt": 30, "completion": 9, "micro_batch": 4, "processes": R}
    fields |= {"optimizer": "adamw_torch", "accumulation": 2} | (HALF if half else {})
    own = {k: changes.pop(k) for k in tuple(changes) if k in Sharding.__dataclass_fields__}
    sharding = Sharding(engine, stage, R if stage else 1, **({"bucket": 100} | own))
    return RunSettings(**(fields | changes), sharding=sharding)


def rank(*args, size=SIZE, **changes):
    return RankMemory(size, run(*args, **changes))


# Bytes a parameter, R ranks: weights, gradients at the update, states (two moments and masters).
@pytest.mark.parametrize(
    ("engine", "stage", "weights", "gradients", "optimizer"),
    [
        ("zero", 1, 2, 2 / R, 12 / R),
        ("zero", 2, 2, 2 / R, 12 / R),
        ("zero", 3, 2 / R, 2 / R, 12 / R),
        ("fsdp1", 3, 4 / R, 4 / R, 8 / R),
        ("fsdp2", 3, 4 / R, 4 / R, 8 / R),
    ],
)
def test_half_precision(engine, stage, weights, gradients, optimizer):
    found = rank(engine, stage)
    assert found.weights == pytest.approx(weights * N)
    assert found.gradients == pytest.approx(gradients * N)
    assert found.optimizer == pytest.approx(optimizer * N)


def test_full_precision():
    assert rank("zero", 2, half=False).optimizer == pytest.approx(12 * N / R)
    found = rank("fsdp2", 3, half=False)
    assert (found.weights, found.gradients) == (4 * N / R, 4 * N / R)
    assert found.optimizer == 8 * N / R
    alone = rank("ddp", half=False)
    assert (alone.weights, alone.gradients, alone.optimizer) == (4 * N, 2 * 4 * N, 8 * N)


@pytest.mark.parametrize(
    ("engine", "stage", "syncs", "expected"),
    [
        ("zero", 1, True, 2 * N + 2 * 100),
        ("zero", 2, True, 2 * N / R),
        ("zero", 3, True, 2 * N / R),
        ("fsdp2", 3, False, 2 * N),
        ("fsdp2", 3, True, 4 * N / R),
    ],
)
def test_gradients_between_micro_batches(engine, stage, syncs, expected):
    assert rank(engine, stage, syncs=syncs).waiting == pytest.approx(expected)


def test_the_reference_is_divided_with_the_policy():
    assert rank("zero", 2, reference=True).reference == 2 * N
    assert rank("zero", 3, reference=True).reference == 2 * N / R
    assert rank("fsdp2", 3, reference=True).reference == 4 * N / R  # as it was loaded
    assert rank("fsdp2", 3).reference == 0


def test_weights_gathered_for_generation():
    matrices, layers = SIZE.layer_matrices, SIZE.layers
    ends = N - matrices
    assert rank("zero", 2).whole == rank("ddp").layerwise == 0
    assert rank("zero", 3).whole == rank("fsdp2", 3).whole == 2 * N
    assert rank("fsdp1", 3).whole == 4 * N
    assert rank("zero", 3).layerwise == pytest.approx(2 * (ends + matrices / layers))
    assert rank("fsdp2", 3).layerwise == pytest.approx(2 * (ends + 2 * matrices / layers))


def test_weights_gathered_for_training():
    assert rank("zero", 3).training == 2 * N  # fewer than may stay
    assert rank("zero", 3, live=1000).training == 2 * 1000
    assert rank("fsdp2", 3, keeps_weights=True).training == 2 * N
    ends, layer = N - SIZE.layer_matrices, SIZE.layer_matrices / SIZE.layers
    assert rank("fsdp2", 3).training == pytest.approx(2 * (ends + 3 * layer))


def test_what_stays_on_the_device_always():
    assert rank("zero", 3).resident().gradients == 2 * N / R
    assert rank("zero", 3).resident().buffers == 2 * 100
    assert rank("fsdp1", 3).resident().gradients == 4 * N / R
    assert rank("fsdp2", 3).resident().gradients == rank("zero", 2).resident().gradients == 0
    assert rank("zero", 2).resident().buffers == 0
    assert rank("zero", 2).first_buckets == 2 * 100
    assert rank("zero", 1, accumulation=1).first_buckets == 2 * 100
    assert rank("zero", 1).first_buckets == rank("zero", 3).first_buckets == 0


def test_offloading_moves_bytes_to_the_host():
    states = rank("zero", 2, offloads_optimizer=True)
    held = states.resident(states.gradients)
    assert (held.weights, held.gradients, held.optimizer) == (2 * N, 0, 0)
    assert states.host == pytest.approx((12 + 4 + 2) * N / R)
    third = rank("zero", 3, offloads_optimizer=True, offloads_weights=True)
    assert third.resident().weights == 0
    assert third.host == pytest.approx((2 + 12 + 4) * N / R)
    fsdp = rank("fsdp2", 3, offloads_optimizer=True, offloads_weights=True)
    assert (fsdp.resident(fsdp.gradients).total, fsdp.host) == (0, pytest.approx(16 * N / R))
    assert rank("zero", 2).host == 0


def test_an_adapter_leaves_the_base_without_states():
    size = model_size(tiny_model("llama").config, LoraConfig(r=4, target_modules=["q_proj"]))
    base, adapter = size.parameters - size.adapter, size.adapter
    zero = rank("zero", 3, size=size)
    assert zero.weights == pytest.approx(2 * (base + adapter) / R)
    assert zero.optimizer == pytest.approx(12 * adapter / R)
    fsdp = rank("fsdp2", 3, size=size, loaded_bytes=2)
    assert fsdp.weights == pytest.approx((2 * base + 4 * adapter) / R)
    assert fsdp.optimizer == pytest.approx(8 * adapter / R)
    alone = rank("ddp", size=size, half=False, weight_bytes=2, product_bytes=2)
    assert alone.weights == 2 * base + 4 * adapter


def test_quantized_weights():
    size = model_size(tiny_model("llama").config, LoraConfig(r=4, target_modules=["q_proj"]))
    ends = size.parameters - size.adapter - size.layer_matrices
    for divides, share in ((True, 1 / R), (False, 1)):
        found = rank("fsdp2", 3, size=size, matrix_bytes=0.5, divides_quantized=divides)
        quantized = 0.5 * size.layer_matrices * share
        assert found.weights == pytest.approx(quantized + 4 * (ends + size.adapter) / R)


@pytest.mark.parametrize(("engine", "stage"), [("zero", 1), ("zero", 2), ("zero", 3), ("fsdp2", 3)])
def test_more_ranks_never_need_more(engine, stage):
    few = Estimate(SIZE, run(engine, stage))
    wider = replace(few.run.sharding, ranks=2 * R)
    many = Estimate(SIZE, few.run.replace(sharding=wider, processes=2 * R))
    for name, parts in many.phases.items():
        assert parts.total < few.phases[name].total


def test_parts_add_up():
    use = MemoryUse(weights=1, kv_cache=2).plus(kv_cache=3, head=0.5)
    assert use == MemoryUse(weights=1, kv_cache=5, head=0.5)
    assert use.total == 6.5
