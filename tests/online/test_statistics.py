import statistics

import pytest
import torch

from trl.online.metrics import MetricStore
from trl.online.statistics import (
    record_clipping,
    record_entropy,
    record_lengths,
    record_ratio,
    record_rewards,
    record_sampling,
    record_tools,
)
from trl.types import RewardTable


def flushed(store):
    return store.flush(lambda value: [value])


def test_tool_calls_by_hand():
    store = MetricStore()
    record_tools(store, None)
    assert flushed(store) == {}
    record_tools(store, [(0, 0), (3, 1)])
    record_tools(store, [(1, 0), (0, 0)])
    assert flushed(store) == {"tools/call_frequency": 1.0, "tools/failure_frequency": 0.25}
    record_tools(store, [(0, 0)])
    assert flushed(store) == {"tools/call_frequency": 0.0, "tools/failure_frequency": None}


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
    found = flushed(store)
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
    assert flushed(store) == pytest.approx(
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
    assert flushed(store)["completions/mean_terminated_length"] == 0


def test_entropy_is_a_token_mean():
    store = MetricStore()
    mask = torch.tensor([[True, True], [True, False]])
    record_entropy(store, torch.tensor([[1.0, 2.0], [6.0, torch.nan]]), mask)
    assert flushed(store)["entropy"] == 3.0


def test_clipping_counts_marked_places_only():
    store = MetricStore()
    low = torch.tensor([[True, False], [False, False]])
    high = torch.tensor([[False, True], [True, True]])
    mask = torch.tensor([[True, True], [True, False]])
    record_clipping(store, low, high, mask)
    assert flushed(store) == pytest.approx(
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
    assert flushed(store) == pytest.approx({f"sampling/{k}": v for k, v in expected.items()})
    record_sampling(store, GAPS, GAPS, None, MASK)
    assert len(flushed(store)) == 2


def test_ratios_by_hand():
    store = MetricStore()
    record_ratio(store, GAPS, GAPS > 0.2, MASK)
    expected = {"min": -0.5, "mean": -0.1 / 3, "max": 0.3}
    found = flushed(store)
    assert found.pop("sampling/frac_out_of_bounds") == pytest.approx(1 / 3)
    assert found == pytest.approx(
        {f"sampling/importance_sampling_ratio/{k}": v for k, v in expected.items()}
    )


def test_without_tokens_there_is_no_extreme():
    """Nor with rows that have no column."""
    for mask in (NONE, NONE[:, :0]):
        store = MetricStore()
        record_ratio(store, GAPS[:, : mask.shape[1]], mask, mask)
        assert set(flushed(store).values()) == {None}
