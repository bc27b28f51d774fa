"""Properties that hold for any rewards and lengths."""

import math

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from trl.ops.advantages import group_relative, leave_one_out, whiten
from trl.ops.masking import length_mask, pad_ragged
from trl.ops.policy_losses import importance_ratio

quick = settings(max_examples=40, deadline=None, derandomize=True)
reward = st.one_of(st.floats(-100, 100), st.just(math.nan))


@st.composite
def reward_groups(draw):
    size = draw(st.integers(1, 6))
    count = draw(st.integers(1, 5))
    values = draw(st.lists(reward, min_size=size * count, max_size=size * count))
    return torch.tensor(values, dtype=torch.float64), size


@quick
@given(reward_groups())
def test_credit_sums_to_zero_in_each_group_and_is_zero_where_nothing_compares(case):
    rewards, size = case
    for credit in (leave_one_out, group_relative):
        advantages = credit(rewards, size).view(-1, size)
        grouped = rewards.view(-1, size)
        scale = max(1.0, advantages.abs().max().item())
        assert advantages.sum(1).abs().max() < 1e-9 * scale
        lone = (~grouped.isnan()).sum(1) < 2
        assert not advantages[lone].any()
        assert not advantages[grouped.isnan()].any()


@quick
@given(reward_groups(), st.randoms(use_true_random=False))
def test_permuting_a_group_permutes_its_credit(case, random):
    rewards, size = case
    order = list(range(size))
    random.shuffle(order)
    index = (torch.arange(len(rewards)).view(-1, size)[:, order]).flatten()
    for credit in (leave_one_out, group_relative):
        torch.testing.assert_close(
            credit(rewards[index], size), credit(rewards, size)[index], rtol=1e-9, atol=1e-9
        )


@quick
@given(reward_groups())
def test_a_group_does_not_depend_on_the_other_groups(case):
    rewards, size = case
    for credit in (leave_one_out, group_relative):
        alone = torch.cat([credit(group, size) for group in rewards.split(size)])
        assert torch.equal(credit(rewards, size), alone)


@quick
@given(reward_groups())
def test_whitened_entries_have_mean_zero_and_deviation_below_one(case):
    rewards, size = case
    mask = ~rewards.isnan()
    found = whiten(leave_one_out(rewards, size), mask)
    assert not found[~mask].any()
    kept = found[mask]
    if len(kept) > 1:
        assert abs(kept.mean()) < 1e-9
        assert kept.std() < 1 + 1e-9


@quick
@given(st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=6), st.integers(1, 4))
def test_padding_is_undone_by_the_lengths(rows, multiple):
    lengths = torch.tensor([len(row) for row in rows])
    right = pad_ragged(rows, 7, multiple=multiple)
    left = pad_ragged(rows, 7, side="left", multiple=multiple)
    mask = length_mask(lengths, right.shape[1])
    assert right.shape[1] % multiple == 0
    for padded, marks in ((right, mask), (left, mask.flip(1))):
        assert [row[m].tolist() for row, m in zip(padded, marks, strict=True)] == rows
        assert (padded[~marks] == 7).all()


@quick
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.integers(0, 4),
    st.sampled_from(["token", "sequence_mean", "sequence_sum"]),
)
def test_ratios_do_not_depend_on_padding(lengths, extra, level):
    width = max(lengths)
    generator = torch.Generator().manual_seed(sum(lengths))
    logps, old_logps = torch.randn(2, len(lengths), width + extra, generator=generator)
    mask = length_mask(torch.tensor(lengths), width + extra)
    narrow = importance_ratio(logps[:, :width], old_logps[:, :width], mask[:, :width], level)
    wide = importance_ratio(logps, old_logps, mask, level)
    torch.testing.assert_close(wide[:, : narrow.shape[1]], narrow, rtol=1e-6, atol=0)
