import math

import torch

from trl.online.metrics import MetricStore


def alone(value):
    return [value]


def test_weighted_mean_over_micro_batches_and_ranks():
    ranks = [MetricStore(), MetricStore()]
    ranks[0].mean("x", 6.0, 3)
    ranks[0].mean("x", torch.tensor(2.0), torch.tensor(1))
    ranks[1].mean("x", 12.0, 1)
    ranks[0].minimum("low", 3.0)
    ranks[1].minimum("low", torch.tensor(1.0))
    ranks[1].maximum("high", torch.tensor(5.0))
    held = []
    ranks[1].flush(lambda value: held.append(value) or [value])
    found = ranks[0].flush(lambda value: [value, *held])
    assert found == {"x": 20 / 5, "low": 1.0, "high": 5.0}


def test_values_skip_nan_and_all_nan_is_none():
    store = MetricStore()
    for value in (1.0, math.nan, 3.0):
        store.value("some", value)
    store.value("none", torch.tensor(math.nan))
    assert store.flush(alone) == {"some": 2.0, "none": None}


def test_extremes_of_nothing_are_none():
    store = MetricStore()
    store.minimum("low", torch.tensor(torch.inf))
    store.maximum("high", 1.0)
    store.maximum("high", 4.0)
    store.maximum("high", 2.0)
    assert store.flush(alone) == {"low": None, "high": 4.0}


def test_flush_forgets():
    store = MetricStore()
    store.value("x", 1.0)
    store.flush(alone)
    assert store.flush(alone) == {}


def test_infinite_values_stay_visible():
    store = MetricStore()
    store.value("x", math.inf)
    assert store.flush(alone) == {"x": math.inf}


def test_gradients_are_not_kept():
    store = MetricStore()
    store.mean("x", torch.ones((), requires_grad=True) * 2, 1)
    assert not store._means["x"][0].requires_grad


def test_what_is_not_logged_yet_goes_on_in_another_process(tmp_path):
    store = MetricStore()
    store.mean("x", torch.tensor(6.0), 3)
    store.value("y", math.nan)
    store.minimum("low", torch.tensor(2.0))
    store.maximum("high", 5.0)
    torch.save(store.state(), tmp_path / "state.pt")
    again = MetricStore()
    again.load(torch.load(tmp_path / "state.pt", weights_only=True))
    for each in (store, again):
        each.mean("x", 12.0, 1)
        each.value("y", 4.0)
        each.minimum("low", 3.0)
        each.maximum("high", 7.0)
    found = again.flush(alone)
    assert found == store.flush(alone) == {"x": 4.5, "y": 4.0, "low": 2.0, "high": 7.0}


def test_a_sum_of_means():
    """Each with its own weight, over all that was added on all ranks."""
    ranks = [MetricStore(), MetricStore()]
    for store, total, weight in zip(ranks, ([6.0, 1.0], [2.0, 8.0]), ([3, 1], [1, 2]), strict=True):
        store.mean("loss", torch.tensor(total), torch.tensor(weight))
    states = []
    ranks[1].flush(lambda mine: states.append(mine) or [mine])
    assert ranks[0].flush(lambda mine: [mine, *states]) == {"loss": 8 / 4 + 9 / 3}
