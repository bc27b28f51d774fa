"""The entropy coefficient against a hand-written schedule."""

import json
import math

import pytest
import torch
from credit_steps import recorded

from trl.algorithms.entropy_bonus import EntropyController
from trl.distributed import Ranks
from trl.online.metrics import MetricStore


def controller(**changes):
    settings = {"coefficient": 0.1, "is_adaptive": True, "target": 0.5}
    settings |= {"delta": 0.04, "lowest": 0.0, "highest": 0.2}
    return EntropyController(**(settings | changes))


def test_the_coefficient_rises_at_or_below_the_target_and_falls_above():
    steered = controller()
    seen = []
    for entropy in (0.4, 0.5, 0.3, 0.6, 0.7, 0.2):
        steered.update(entropy)
        seen.append(steered.coefficient)
    assert seen == pytest.approx([0.14, 0.18, 0.2, 0.16, 0.12, 0.16], abs=1e-15)


def test_the_coefficient_stays_within_its_bounds():
    steered = controller(lowest=0.05)
    for entropy, bound in ((0.0, 0.2), (9.0, 0.05)):
        for _ in range(20):
            steered.update(entropy)
            assert 0.05 <= steered.coefficient <= 0.2
        assert steered.coefficient == bound


def test_the_bonus_counts_only_while_the_last_entropy_is_low():
    steered = controller()
    assert steered.active == 0.0
    steered.update(0.5)
    assert steered.active == steered.coefficient == pytest.approx(0.14)
    steered.update(0.51)
    assert steered.active == 0.0
    assert steered.coefficient == pytest.approx(0.1)


def test_a_fixed_coefficient_always_counts_and_never_moves():
    fixed = controller(is_adaptive=False)
    for entropy in (0.1, 3.0):
        assert fixed.active == 0.1
        fixed.update(entropy)
    assert fixed.active == fixed.coefficient == 0.1


@pytest.mark.parametrize(
    ("coefficient", "adaptive", "used"),
    [(0.0, False, False), (0.1, False, True), (-0.1, False, True), (0.0, True, True)],
)
def test_it_is_used_if_there_is_or_may_be_a_bonus(coefficient, adaptive, used):
    assert controller(coefficient=coefficient, is_adaptive=adaptive).is_used is used


@pytest.mark.parametrize("cut", range(5))
def test_a_run_resumed_from_its_saved_state_continues_as_if_uninterrupted(cut):
    entropies = (0.4, 0.61, 0.3, 0.2, 0.9)
    whole, first, second = controller(), controller(), controller()
    for entropy in entropies:
        whole.update(entropy)
    for entropy in entropies[:cut]:
        first.update(entropy)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.state() == first.state()
    for entropy in entropies[cut:]:
        second.update(entropy)
    assert second.state() == whole.state()


def test_a_saved_state_holds_what_moves_and_leaves_the_options_to_the_config():
    steered = controller()
    steered.update(0.25)
    assert steered.state() == {"coefficient": pytest.approx(0.14), "measured": 0.25}
    other = controller(target=0.1)
    other.restore(steered.state())
    assert other.target == 0.1
    assert other.active == 0.0


def test_a_restored_coefficient_obeys_the_bounds_of_the_config():
    steered = controller(highest=0.15)
    steered.restore({"coefficient": 0.9, "measured": 0.1})
    assert steered.active == 0.15


@pytest.mark.parametrize("entropy", [math.nan, math.inf])
def test_an_entropy_that_is_not_finite_moves_nothing(entropy):
    steered, other = controller(), controller()
    for steps in (steered, other):
        steps.update(0.4)
    steered.update(entropy)
    assert steered.state() == other.state()


def test_the_chunks_of_an_update_are_measured_together():
    """Those from before it began again do not count."""
    steered, metrics = controller(), MetricStore()
    steered.observe(torch.tensor(100.0), torch.tensor(1))
    steered.discard_update()
    steered.observe(torch.tensor(0.6), torch.tensor(2))
    steered.observe(torch.tensor(0.9), torch.tensor(1))
    steered.end_update(Ranks(), metrics)
    assert recorded(metrics) == {"entropy_coef": 0.0}, "of the update itself"
    assert steered.state() == {"coefficient": pytest.approx(0.14), "measured": pytest.approx(0.5)}
    steered.end_update(Ranks(), metrics)
    assert not recorded(metrics), "an update without a chunk measures nothing"
