"""What an engine is given, against sums made by hand."""

import pytest
from tiny import tiny_model

from trl.memory.engine import SMALLEST_CACHE, EngineNeeds, engine_memory, working_bytes
from trl.memory.estimate import Estimate
from trl.memory.model_size import model_size
from trl.memory.plan import HEADROOM, Plan
from trl.memory.probes import DeviceMemory
from trl.memory.settings import RunSettings

SIZE = model_size(tiny_model("llama", max_position_embeddings=4096).config)
RUN = RunSettings(4, 200, 50, 4, slices=2, accumulation=2, on_cpu=True)
NEEDS = EngineNeeds(weights=1e6, token=1e6, tokens=2000, context=4096, entry=2, rows=8)


def phases(sleeps):
    run = RUN.replace(engine_bytes=0.0, engine_sleeps=sleeps)
    return {name: parts.total for name, parts in Estimate(SIZE, run).phases.items()}


def given(left, sleeps=False, shortest=51, **changes):
    """The memory of an engine for whose cache so many bytes are left."""
    needs = EngineNeeds(**{**NEEDS.__dict__, **changes})
    taken = phases(sleeps)
    busy = taken["generation"] if sleeps else max(taken.values())
    fixed = needs.weights + working_bytes(Plan(SIZE, RUN, 0.0), needs)
    device = (busy + fixed + left) / (1 - HEADROOM)
    return engine_memory(Plan(SIZE, RUN, device), needs, sleeps, shortest)


@pytest.mark.parametrize("sleeps", [False, True])
def test_the_cache_gets_what_is_left(sleeps):
    found = given(300e6, sleeps)
    assert found.cache == pytest.approx(300e6, rel=1e-6)
    assert found.context == pytest.approx(300, abs=1)


def test_an_engine_that_sleeps_does_not_meet_the_largest_phase():
    assert phases(True)["generation"] < max(phases(True).values())


def test_no_more_than_the_round_needs():
    found = given(20e9)
    assert (found.cache, found.context) == (4096 * 10**6, 4096), "one context must fit at least"
    assert given(20e9, tokens=9000).cache == 9000 * 10**6
    assert given(20e9, token=10.0).cache == SMALLEST_CACHE


def test_the_whole_is_what_is_reserved():
    found = given(300e6)
    fixed = NEEDS.weights + working_bytes(Plan(SIZE, RUN, 0.0), NEEDS)
    assert found.total == pytest.approx(fixed + found.cache)


@pytest.mark.parametrize(
    ("sleeps", "words"),
    [
        (False, "does not fit beside training.*needs 0.051 GB more. Set vllm_enable_sleep_mode"),
        (True, "does not fit beside training.*generation takes.*Lower max_completion_length"),
    ],
)
def test_too_little_for_one_completion_is_said_in_numbers(sleeps, words):
    assert given(52e6, sleeps).context in (51, 52)
    with pytest.raises(ValueError, match=words):
        given(50e6, sleeps)


def with_measured(measured):
    """The memory of an engine on a device that, by the plan, has 600 MB left for the cache."""
    taken = phases(False)
    fixed = NEEDS.weights + working_bytes(Plan(SIZE, RUN, 0.0), NEEDS)
    plan = Plan(SIZE, RUN, (max(taken.values()) + fixed + 600e6) / (1 - HEADROOM))
    found = None if measured is None else measured(plan.device_bytes)
    return engine_memory(plan, NEEDS, False, 51, found)


def test_less_free_memory_than_planned_makes_a_smaller_engine():
    """Another process uses some of the device."""
    assert with_measured(None).cache == pytest.approx(600e6, rel=1e-6)
    empty = with_measured(lambda device: DeviceMemory(free=device, held=0.0))
    assert empty == with_measured(None)
    shared = with_measured(lambda device: DeviceMemory(free=device - 200e6, held=0.0))
    assert shared.cache == pytest.approx(600e6 - (1 - HEADROOM) * 200e6, rel=1e-6)
    assert shared.context < with_measured(None).context
    # Weights that are there already are part of what training takes.
    held = with_measured(lambda device: DeviceMemory(free=device - 300e3, held=300e3))
    assert held == with_measured(None)


def test_training_that_holds_more_than_planned_makes_a_smaller_engine():
    busy = max(phases(False).values())
    found = with_measured(lambda device: DeviceMemory(device - busy - 1e8, held=busy + 1e8))
    assert found.cache == pytest.approx(500e6, rel=1e-6)


def test_too_little_free_memory_is_an_error_that_names_both_numbers():
    with pytest.raises(ValueError, match="0.06 GB of the device's .* GB are free now"):
        with_measured(lambda device: DeviceMemory(free=60e6, held=2e6))
