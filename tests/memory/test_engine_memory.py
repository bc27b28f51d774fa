"""What an engine beside training is given."""

import pytest
from tiny import tiny_model

from trl.memory.engine_memory import BLOCK, SMALLEST_CACHE, Engine
from trl.memory.estimate import Estimate
from trl.memory.meter import DeviceMemory
from trl.memory.model_size import model_size
from trl.memory.plan import HEADROOM, Plan
from trl.memory.settings import RunSettings

DEEP = model_size(tiny_model("llama", num_hidden_layers=64, head_dim=256).config)
# Training holds more than generation.
DEEP_RUN = RunSettings(4, 200, 50, 4, 2, 2, gradient_checkpointing=False, on_cpu=True)
ROWS, CONTEXT = 8, 4096


def engine(device, sleeps=False, **changes):
    """An engine of one rank on a device of so many bytes."""
    fields = {"ranks": 1, "context": CONTEXT, "rows": ROWS} | changes
    return Engine(Plan(DEEP, DEEP_RUN, device), sleeps=sleeps, **fields)


TOKEN = engine(0.0).token
FIXED = engine(0.0).weights + engine(0.0).working


def phases(sleeps):
    run = DEEP_RUN.replace(engine_bytes=0.0, engine_sleeps=sleeps)
    return {name: parts.total for name, parts in Estimate(DEEP, run).phases.items()}


def given(left, sleeps=False, shortest=51, **changes):
    """The memory of an engine for whose cache so many bytes are left."""
    taken = phases(sleeps)
    busy = taken["generation"] if sleeps else max(taken.values())
    fixed = engine(0.0, **changes).weights + engine(0.0, **changes).working
    device = (busy + fixed + left) / (1 - HEADROOM)
    return engine(device, sleeps, **changes).memory(shortest)


def test_what_an_engine_holds():
    assert 2 * 4 * DEEP.keys * DEEP.layers == TOKEN
    assert engine(0.0, ranks=2).token == TOKEN / 2
    assert engine(0.0).weights == 4 * DEEP.parameters == 2 * engine(0.0, ranks=2).weights
    assert engine(0.0, rows=9).working - engine(0.0).working == 4 * 3 * DEEP.vocabulary


@pytest.mark.parametrize("sleeps", [False, True])
def test_the_cache_gets_what_is_left(sleeps):
    found = given(300.5 * TOKEN, sleeps)
    assert found.cache == pytest.approx(300.5 * TOKEN, abs=1)
    assert found.context == 300


def test_an_engine_that_sleeps_does_not_meet_the_largest_phase():
    assert phases(True)["generation"] < max(phases(True).values())


def test_no_more_than_the_round_needs():
    found = given(20e9)
    assert (found.cache, found.context) == (CONTEXT * TOKEN, CONTEXT), "one context fits at least"
    row = -(-250 // BLOCK) * BLOCK  # a prompt with its completion
    assert given(20e9, rows=100).cache == 100 * row * TOKEN
    assert given(20e9, rows=100, context=64).cache == 100 * 64 * TOKEN
    assert given(20e9, ranks=2**20).cache == SMALLEST_CACHE


def test_the_whole_is_what_is_reserved():
    found = given(300.5 * TOKEN)
    assert found.total == pytest.approx(FIXED + found.cache)


@pytest.mark.parametrize(
    ("sleeps", "words"),
    [
        (False, "does not fit beside training.*needs 13.4 MB more. Set vllm_enable_sleep_mode"),
        (True, "does not fit beside training.*generation takes.*Lower max_completion_length"),
    ],
)
def test_too_little_for_one_completion_is_said_in_numbers(sleeps, words):
    assert given(51.5 * TOKEN, sleeps).context == 51
    with pytest.raises(ValueError, match=words):
        given(50.5 * TOKEN, sleeps)


def with_measured(measured):
    """The memory of an engine on a device that, by the plan, has 600 MB left for the cache."""
    taken = phases(False)
    found = engine((max(taken.values()) + FIXED + 600e6) / (1 - HEADROOM))
    return found.memory(51, None if measured is None else measured(found.plan.device_bytes))


def test_less_free_memory_than_planned_makes_a_smaller_engine():
    """Another process uses some of the device."""
    assert with_measured(None).cache == pytest.approx(600e6, rel=1e-3)
    empty = with_measured(lambda device: DeviceMemory(free=device, used=0.0))
    assert empty == with_measured(None)
    shared = with_measured(lambda device: DeviceMemory(free=device - 200e6, used=0.0))
    assert shared.cache == pytest.approx(600e6 - (1 - HEADROOM) * 200e6, rel=1e-3)
    assert shared.context < with_measured(None).context
    # Weights that are there already are part of what training takes.
    held = with_measured(lambda device: DeviceMemory(free=device - 300e3, used=300e3))
    assert held == with_measured(None)


def test_training_that_holds_more_than_planned_makes_a_smaller_engine():
    busy = max(phases(False).values())
    found = with_measured(lambda device: DeviceMemory(device - busy - 1e8, used=busy + 1e8))
    assert found.cache == pytest.approx(500e6, rel=1e-3)


def test_too_little_free_memory_is_an_error_that_names_both_numbers():
    with pytest.raises(ValueError, match="60 MB of the device's .* are free now"):
        with_measured(lambda device: DeviceMemory(free=60e6, used=2e6))
