"""Token credit, against sums written out from the definition."""

from functools import partial

import pytest
import torch

from trl.ops.gae import (
    clipped_value_loss,
    generalized_advantages,
    token_rewards,
    whitened,
)

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
