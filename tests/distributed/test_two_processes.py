"""One process, and two under each engine, give the same completions, weights and metrics."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engines import ENGINES, SHARDED, launch
from one_step import CELLS, run

SCRIPT = Path(__file__).with_name("one_step.py")
# Seconds, and what depends on when a run was started.
# Ranks that have parts of one group each compute its prompt, so they count more operations.
UNLIKE = ("step_time", "runtime", "per_second", "epoch", "total_flos")
SAVINGS = ["training", "shared_prefix", "logits_chunk_size", "skip_zero_advantages"]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """What each engine made of each cell."""
    return launch(SCRIPT, "ddp", tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Two micro-batches of 8 rows here are 4 on each of two ranks: the same 16 rows."""
    folder = tmp_path_factory.mktemp("one")
    return {cell: run(cell, folder / cell, 8) for cell in CELLS}


def check(one, two):
    for mode in ("train", "eval"):
        assert len(one[mode]) == len(two[mode]) > 0
        for a, b in zip(one[mode], two[mode], strict=True):
            for name in ("prompt", "completion_ids", "group", "reward", "step", "finish"):
                assert a[name] == b[name], (mode, name)
            assert abs(a["advantage"] - b["advantage"]) < 1e-5
    difference = (one["weights"] - two["weights"]).norm() / one["weights"].norm()
    assert difference < 2e-7
    for a, b in zip(one["history"], two["history"], strict=True):
        for name, value in a.items():
            if not any(part in name for part in UNLIKE):
                assert alike(value, b[name]), (name, value, b[name])


def alike(one, two) -> bool:
    """Equal but for rounding; some engines write infinity where others write NaN."""
    if not math.isfinite(one):
        return not math.isfinite(two)
    return one == pytest.approx(two, rel=1e-4, abs=1e-5)


@pytest.mark.distributed
@pytest.mark.covers(engine="$engine", saving="$cell")
@pytest.mark.parametrize("cell", ["Online DPO", "PPO", "PPO with a value model"])
@pytest.mark.parametrize("engine", ENGINES)
def test_pairs_and_values_are_those_of_one_process(alone, on_two, engine, cell):
    check(alone[cell], on_two[0][engine, cell])


@pytest.mark.distributed
@pytest.mark.covers(engine="$engine", saving=[*SAVINGS, "reference", "sync_ref_model"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_reference_that_follows_the_policy(alone, on_two, engine):
    check(alone["reference"], on_two[0][engine, "reference"])
    penalties = [record["kl"] for record in alone["reference"]["history"] if "kl" in record]
    assert max(penalties) > 1e-4


@pytest.mark.distributed
@pytest.mark.parametrize("engine", ENGINES)
def test_a_gradient_of_nan_on_one_rank_changes_no_weight(alone, on_two, engine):
    check(alone["skip"], on_two[0][engine, "skip"])
    history = on_two[0][engine, "skip"]["history"]
    skipped = [record.get("frac_skipped_updates") for record in history]
    assert skipped[:2] == [1.0, 0.0]


@pytest.mark.distributed
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cell", CELLS)
def test_what_is_sharded_stays_so(alone, on_two, engine, cell):
    """Policy and reference, after generation, scoring, training and evaluation."""
    whole = alone[cell]["held"]
    for rank in on_two:
        most = 0.6 if engine in SHARDED else 1.0
        for mine, all_of_it in zip(rank[engine, cell]["held"], whole, strict=True):
            assert mine <= most * all_of_it
    everything = zip(*(rank[engine, cell]["held"] for rank in on_two), whole, strict=True)
    assert all(one + other >= all_of_it for one, other, all_of_it in everything)
