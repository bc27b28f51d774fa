import math
import statistics
from functools import partial

import pytest
import torch

from trl.ops.advantages import (
    clipped_value_loss,
    generalized_advantages,
    group_relative,
    leave_one_out,
    normalize_then_sum,
    token_rewards,
    whiten,
    whitened,
)

NAN = torch.nan


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def groups(values, size):
    return [values[start : start + size] for start in range(0, len(values), size)]


def present(values):
    return [value for value in values if not math.isnan(value)]


def slow_leave_one_out(rewards, size):
    """Equation of arXiv 2402.14740: r_i - 1 / (k - 1) * sum_{j != i} r_j."""
    advantages = []
    for group in groups(rewards, size):
        for i, reward in enumerate(group):
            others = present(r for j, r in enumerate(group) if j != i)
            lone = math.isnan(reward) or not others
            advantages.append(0.0 if lone else reward - sum(others) / len(others))
    return advantages


def slow_group_relative(rewards, size, scale):
    advantages = []
    for group in groups(rewards, size):
        found = present(group)
        pool = found if scale == "group" else present(rewards)
        divisor = (statistics.stdev(pool) if len(pool) > 1 else 0.0) + 1e-4
        divisor = 1.0 if scale == "none" else divisor
        for reward in group:
            lone = math.isnan(reward) or len(found) < 2
            advantages.append(0.0 if lone else (reward - statistics.fmean(found)) / divisor)
    return advantages


REWARDS = [1.0, 0.0, 0.5, -2.0, NAN, 3.0, 3.0, 0.25, NAN, NAN, 1.0, NAN, NAN, NAN, NAN, NAN]


def random_rewards(count, share_of_nan, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(count, generator=generator, dtype=torch.float64)
    rewards[torch.rand(count, generator=generator) < share_of_nan] = NAN
    return rewards


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_leave_one_out_is_the_loop_of_the_paper(size):
    for rewards in (tensor(REWARDS), random_rewards(48, 0.3), random_rewards(48, 0.0)):
        expected = tensor(slow_leave_one_out(rewards.tolist(), size))
        torch.testing.assert_close(leave_one_out(rewards, size), expected, rtol=0, atol=1e-14)


def test_leave_one_out_is_a_scaled_distance_from_the_mean():
    rewards = random_rewards(24, 0.0).view(-1, 6)
    expected = 6 / 5 * (rewards - rewards.mean(1, keepdim=True))
    found = leave_one_out(rewards.flatten(), 6).view(-1, 6)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 1], [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ([2, NAN, 4, 3], [-1.5, 0, 1.5, 0]),
        ([1, 1, 1, 0, 0, 0, 0, 0], [5 / 7] * 3 + [-3 / 7] * 5),
        ([5, NAN], [0, 0]),
        ([NAN, NAN], [0, 0]),
        ([7], [0]),
    ],
)
def test_leave_one_out_by_hand(rewards, expected):
    found = leave_one_out(tensor(rewards), len(rewards))
    torch.testing.assert_close(found, tensor(expected), rtol=0, atol=1e-15)


@pytest.mark.parametrize("credit", [leave_one_out, group_relative])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 123456.7])
def test_equal_rewards_give_exactly_no_credit(credit, value):
    rewards = torch.full((21,), value)
    rewards[5] = NAN
    assert not credit(rewards, 7).any()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_group_relative_is_a_loop_over_groups(scale, size):
    for rewards in (tensor(REWARDS), random_rewards(48, 0.3), random_rewards(48, 0.0)):
        expected = tensor(slow_group_relative(rewards.tolist(), size, scale))
        found = group_relative(rewards, size, scale)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_a_row_without_reward_does_not_move_its_siblings():
    rest = tensor([1.0, 4.0, 2.0])
    with_hole = tensor([1.0, NAN, 4.0, 2.0])
    for credit in (leave_one_out, group_relative):
        found = credit(with_hole, 4)
        torch.testing.assert_close(found[[0, 2, 3]], credit(rest, 3), rtol=0, atol=1e-15)
        assert found[1] == 0


@pytest.mark.parametrize("credit", [leave_one_out, group_relative])
def test_an_infinite_reward_stays_visible(credit):
    found = credit(tensor([1.0, torch.inf, 2.0, 3.0]), 4)
    assert not found.isfinite().all()


def slow_normalize_then_sum(table, weights, size):
    totals, comparable = [], []
    for group in groups(table, size):
        scored = [bool(present(row)) for row in group]
        for row, row_is_scored in zip(group, scored, strict=True):
            total = 0.0
            for f, weight in enumerate(weights):
                column = present(r[f] for r in group)
                if math.isnan(row[f]):
                    continue
                std = statistics.stdev(column) if len(column) > 1 else 0.0
                total += weight * (row[f] - statistics.fmean(column)) / (std + 1e-4)
            totals.append(total if row_is_scored else NAN)
            comparable.append(row_is_scored and sum(scored) > 1)
    pool = present(totals)
    mean, std = statistics.fmean(pool), statistics.stdev(pool)
    return [
        (total - mean) / (std + 1e-4) if counts else 0.0
        for total, counts in zip(totals, comparable, strict=True)
    ]


def test_normalize_then_sum_is_a_loop_over_functions_and_groups():
    table = random_rewards(48, 0.25).view(16, 3)
    table[1], table[4:7] = NAN, NAN  # a row nobody scored, and a group with one scored row
    weights = [1.0, 0.5, 2.0]
    expected = tensor(slow_normalize_then_sum(table.tolist(), weights, 4))
    found = normalize_then_sum(table, tensor(weights), 4)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    assert not found[[1, 4, 5, 6, 7]].any()


def test_normalize_then_sum_gives_each_function_the_same_say():
    small, large = tensor([0.0, 1.0, 0.0, 1.0]), tensor([1000.0, 1000.0, 0.0, 0.0])
    found = normalize_then_sum(torch.stack([small, large], 1), tensor([1.0, 1.0]), 4)
    assert found[0].item() == pytest.approx(found[3].item(), abs=1e-3)
    assert found[1] > 1 and found[2] < -1


def test_whiten_is_a_z_score_over_the_marked_entries():
    values = tensor([3.0, NAN, -4.0, 100.0, 1.0])
    mask = torch.tensor([True, False, True, False, True])
    kept = [3.0, -4.0, 1.0]
    mean, std = statistics.fmean(kept), statistics.stdev(kept)
    expected = [(3 - mean) / (std + 1e-4), 0.0, (-4 - mean) / (std + 1e-4), 0.0]
    expected.append((1 - mean) / (std + 1e-4))
    torch.testing.assert_close(whiten(values, mask), tensor(expected), rtol=0, atol=1e-14)


def whitened_leave_one_out(rewards, size):
    return whiten(leave_one_out(rewards, size), ~rewards.isnan())


def summed_normalized(rewards, size):
    per_function = torch.stack([rewards, rewards.square()], 1)
    return normalize_then_sum(per_function, torch.ones(2), size)


@pytest.mark.parametrize("credit", [whitened_leave_one_out, summed_normalized])
def test_whitening_keeps_the_zeros_of_groups_without_signal(credit):
    """In float32 the mean of the others is rounded; rows of such groups are left out by their 0."""
    for seed in range(50):
        rewards = random_rewards(64, 0.0, seed=seed).float()
        rewards[8:12] = rewards[8]
        found = credit(rewards, 4)
        assert not found[8:12].any() and found[:8].all()


@pytest.mark.parametrize("mask", [[False, False], [True, False]])
def test_whiten_of_too_few_entries_is_zero(mask):
    assert whiten(tensor([0.0, 4.0]), torch.tensor(mask)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("credit", [leave_one_out, group_relative])
@pytest.mark.parametrize("size", [0, 4])
def test_groups_that_do_not_fit(credit, size):
    with pytest.raises(ValueError, match=f"6 rewards cannot be cut into groups of {size}"):
        credit(torch.zeros(6), size)


def test_an_unknown_scale_names_the_legal_ones():
    with pytest.raises(ValueError, match="'group', 'batch' or 'none', not 'std'"):
        group_relative(torch.zeros(4), 2, "std")


# --- Credit of single tokens ---


BOUND = {"rtol": 1e-12, "atol": 1e-12}


def by_definition(rewards, values, gamma, lam):
    """A_t = sum over l of (gamma lam)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l})."""
    steps = len(rewards)
    after = [*values[1:], 0.0][:steps]
    surprises = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [
        sum((gamma * lam) ** (k - t) * surprises[k] for k in range(t, steps)) for t in range(steps)
    ]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_advantages_of_ragged_rows_with_gaps(gamma, lam):
    torch.manual_seed(0)
    rewards, values = (torch.randn(5, 7, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(5, 7) < 0.7
    mask[3] = False
    mask[4] = True
    junk = rewards.masked_fill(~mask, torch.nan), values.masked_fill(~mask, torch.nan)
    found = generalized_advantages(*junk, mask, gamma, lam)
    expected = torch.zeros_like(rewards)
    for row in range(5):
        at = mask[row]
        credit = by_definition(rewards[row][at].tolist(), values[row][at].tolist(), gamma, lam)
        expected[row][at] = torch.tensor(credit, dtype=torch.float64)
    torch.testing.assert_close(found, expected, **BOUND)


def test_full_weight_gives_returns_minus_values():
    rewards = torch.tensor([[0.0, 1.0, -2.0]], dtype=torch.float64)
    values = torch.tensor([[0.5, 0.25, 3.0]], dtype=torch.float64)
    found = generalized_advantages(rewards, values, torch.ones(1, 3, dtype=bool), 1.0, 1.0)
    expected = torch.tensor([[-1.0, -1.0, -2.0]], dtype=torch.float64) - values
    torch.testing.assert_close(found, expected, **BOUND)


@pytest.mark.parametrize(
    ("value", "wanted", "expected", "slope"),
    [
        (1.1, 2.0, 0.5 * 0.9**2, -0.9),  # within the width: the plain error
        (
            1.5,
            2.0,
            0.5 * 0.8**2,
            0.0,
        ),  # went too far towards the return: the error where it was stopped
        (0.5, 0.0, 0.5 * 0.8**2, 0.0),  # the same, downwards
        (0.5, 2.0, 0.5 * 1.5**2, -1.5),  # went the wrong way: the plain error is the worse
    ],
)
def test_value_loss_by_hand(value, wanted, expected, slope):
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    old, returns = (torch.tensor([[x]], dtype=torch.float64) for x in (1.0, wanted))
    loss = clipped_value_loss(values, old, returns, 0.2)
    loss.sum().backward()
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert values.grad.item() == pytest.approx(slope, abs=1e-12)


def test_the_reward_of_a_completion_is_that_of_its_last_marked_token():
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    penalties = torch.full((3, 5), -0.5)
    found = token_rewards(torch.tensor([2.0, 3.0, torch.nan]), penalties, mask)
    expected = penalties.clone()
    expected[0, 3] += 2.0
    expected[1, 0] += 3.0
    assert torch.equal(found, expected)


@pytest.mark.parametrize("keeps_mean", [False, True])
def test_whitening_is_over_all_ranks(keeps_mean):
    torch.manual_seed(0)
    values = torch.randn(6, 7, dtype=torch.float64) * 3 + 2
    mask = torch.rand(6, 7) < 0.6
    whole = whitened(values, mask, lambda x: x, keeps_mean)
    marked = values[mask]
    expected = (marked - marked.mean()) / marked.std() + (marked.mean() if keeps_mean else 0.0)
    assert torch.allclose(whole[mask], expected, atol=1e-8)
    assert not whole[~mask].any()
    sums = [mask.sum(), values[mask].sum(), (values[mask] - marked.mean()).square().sum()]
    for part in (slice(0, 2), slice(2, 6)):
        known = list(sums)
        found = whitened(values[part], mask[part], partial(next_of, known), keeps_mean)
        assert torch.allclose(found, whole[part])


def next_of(known, part):
    """What a sum over ranks would return, whatever this rank adds to it."""
    return known.pop(0)
