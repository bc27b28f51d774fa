import math
import statistics

import pytest
import torch

from trl.online.metrics import (
    MetricStore,
    record_clipping,
    record_entropy,
    record_lengths,
    record_pairs,
    record_ratio,
    record_rewards,
    record_sampling,
    record_tools,
)
from trl.types import RewardTable


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


def test_a_sum_of_means_of_which_one_has_nothing_is_not_measured():
    store = MetricStore()
    store.mean("x", torch.tensor([2.0, 0.0]), torch.tensor([4.0, 0.0]))
    store.mean("y", torch.tensor([2.0, 3.0]), torch.tensor([4.0, 2.0]))
    assert store.flush(alone) == {"x": None, "y": 2.0}


def test_the_reward_of_pairs_is_that_of_completions_that_could_be_scored():
    store = MetricStore()
    log_ratios = torch.tensor([[0.5, -0.5], [1.0, 0.0]])
    rewards = torch.tensor([1.0, math.nan, 2.0, 3.0])
    record_pairs(store, torch.full((2, 2), -1.0), log_ratios, rewards, 2.0)
    found = store.flush(alone)
    assert found["objective/rlhf_reward"] == pytest.approx(2.0 - 2.0 * 0.25)
    assert found["rewards/margins"] == pytest.approx(2.0)


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
    again.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    for each in (store, again):
        each.mean("x", 12.0, 1)
        each.value("y", 4.0)
        each.minimum("low", 3.0)
        each.maximum("high", 7.0)
    found = again.flush(alone)
    assert found == store.flush(alone) == {"x": 4.5, "y": 4.0, "low": 2.0, "high": 7.0}


def test_sums_of_a_checkpoint_go_on_where_new_values_are():
    store, again = MetricStore(), MetricStore()
    store.mean("loss", torch.ones(2), torch.ones(2))
    again.restore(store.state())
    again.mean("loss", torch.ones(2, device="meta"), torch.ones(2, device="meta"))
    assert {value.device.type for value in again._means["loss"]} == {"meta"}


def test_a_sum_of_means():
    """Each with its own weight, over all that was added on all ranks."""
    ranks = [MetricStore(), MetricStore()]
    for store, total, weight in zip(ranks, ([6.0, 1.0], [2.0, 8.0]), ([3, 1], [1, 2]), strict=True):
        store.mean("loss", torch.tensor(total), torch.tensor(weight))
    states = []
    ranks[1].flush(lambda mine: states.append(mine) or [mine])
    assert ranks[0].flush(lambda mine: [mine, *states]) == {"loss": 8 / 4 + 9 / 3}


# --- What is recorded ---


def test_tool_calls_by_hand():
    store = MetricStore()
    record_tools(store, None)
    assert store.flush(alone) == {}
    record_tools(store, [(0, 0), (3, 1)])
    record_tools(store, [(1, 0), (0, 0)])
    assert store.flush(alone) == {"tools/call_frequency": 1.0, "tools/failure_frequency": 0.25}
    record_tools(store, [(0, 0)])
    assert store.flush(alone) == {"tools/call_frequency": 0.0, "tools/failure_frequency": None}


def test_rewards_by_hand():
    nan = torch.nan
    table = RewardTable(
        per_function=torch.tensor(
            [[1.0, nan], [1.0, nan], [0.0, 2.0], [1.0, 4.0], [nan, nan], [1, 1]]
        ),
        weights=torch.ones(2),
        total=torch.tensor([1.0, 1.0, 2.0, 5.0, nan, 2.0]),
        names=("a", "b"),
        group_size=2,
    )
    store = MetricStore()
    record_rewards(store, table)
    found = store.flush(alone)
    assert found["rewards/a/mean"] == pytest.approx(4 / 5)
    assert found["rewards/b/mean"] == pytest.approx(7 / 3)
    assert found["rewards/b/std"] == pytest.approx(statistics.stdev([2, 4, 1]))
    assert found["reward"] == pytest.approx(11 / 5)
    assert found["reward_std"] == pytest.approx(statistics.stdev([1, 1, 2, 5, 2]))
    assert found["frac_reward_zero_std"] == pytest.approx(2 / 3), "equal group and lone row"
    assert found["frac_groups_without_baseline"] == pytest.approx(1 / 3)


def test_lengths_by_hand():
    store = MetricStore()
    record_lengths(store, torch.tensor([3, 5, 10]), torch.tensor([True, True, False]))
    assert store.flush(alone) == pytest.approx(
        {
            "completions/mean_length": 6,
            "completions/min_length": 3,
            "completions/max_length": 10,
            "completions/mean_terminated_length": 4,
            "completions/min_terminated_length": 3,
            "completions/max_terminated_length": 5,
            "completions/clipped_ratio": 1 / 3,
        }
    )


def test_terminated_lengths_are_zero_when_none_ended():
    store = MetricStore()
    record_lengths(store, torch.tensor([4, 4]), torch.tensor([False, False]))
    assert store.flush(alone)["completions/mean_terminated_length"] == 0


def test_entropy_is_a_token_mean():
    store = MetricStore()
    mask = torch.tensor([[True, True], [True, False]])
    record_entropy(store, torch.tensor([[1.0, 2.0], [6.0, torch.nan]]), mask)
    assert store.flush(alone)["entropy"] == 3.0


def test_clipping_counts_marked_places_only():
    store = MetricStore()
    low = torch.tensor([[True, False], [False, False]])
    high = torch.tensor([[False, True], [True, True]])
    mask = torch.tensor([[True, True], [True, False]])
    record_clipping(store, low, high, mask)
    assert store.flush(alone) == pytest.approx(
        {
            "clip_ratio/low_mean": 1 / 3,
            "clip_ratio/high_mean": 2 / 3,
            "clip_ratio/region_mean": 1.0,
            "clip_ratio/low_min": 0.0,
            "clip_ratio/high_max": 1.0,
        }
    )


MASK = torch.tensor([[True, True, False], [True, False, False]])
GAPS = torch.tensor([[0.3, -0.5, torch.nan], [0.1, 9.0, 9.0]])
NONE = torch.zeros(2, 3, dtype=torch.bool)


def test_differences_of_log_probabilities_by_hand():
    store = MetricStore()
    mass = torch.tensor([[0.5, 0.25, torch.nan], [0.75, 9.0, 9.0]]).log()
    record_sampling(store, GAPS, GAPS / 2, mass, MASK)
    expected = {
        "sampling_logp_difference/mean": 0.3,
        "sampling_logp_difference/max": 0.5,
        "replayed_logp_difference/mean": 0.15,
        "replayed_logp_difference/max": 0.25,
        "kept_mass": 0.5,
    }
    assert store.flush(alone) == pytest.approx({f"sampling/{k}": v for k, v in expected.items()})
    record_sampling(store, GAPS, GAPS, None, MASK)
    assert len(store.flush(alone)) == 2


def test_ratios_by_hand():
    store = MetricStore()
    record_ratio(store, GAPS, GAPS > 0.2, MASK)
    expected = {"min": -0.5, "mean": -0.1 / 3, "max": 0.3}
    found = store.flush(alone)
    assert found.pop("sampling/frac_out_of_bounds") == pytest.approx(1 / 3)
    assert found == pytest.approx(
        {f"sampling/importance_sampling_ratio/{k}": v for k, v in expected.items()}
    )


def test_without_tokens_there_is_no_extreme():
    """Nor with rows that have no column."""
    for mask in (NONE, NONE[:, :0]):
        store = MetricStore()
        record_ratio(store, GAPS[:, : mask.shape[1]], mask, mask)
        assert set(store.flush(alone).values()) == {None}
