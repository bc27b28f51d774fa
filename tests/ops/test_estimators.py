"""Expectations by enumeration: a policy over sequences of two tokens from three symbols.

Every outcome of sampling G completions is visited with its probability, so a bias is a number and
not a matter of luck.
"""

import itertools

import pytest
import torch

from trl.ops.advantages import group_relative, leave_one_out
from trl.ops.kl import k3, sequence_kl
from trl.ops.policy_losses import clipped_surrogate, importance_ratio

SEQUENCES = torch.tensor(list(itertools.product(range(3), repeat=2)))
REWARDS = torch.tensor([0.0, 1.0, 0.2, 3.0, -1.0, 0.5, 0.0, 2.0, 0.7], dtype=torch.float64)
MASK = torch.ones(9, 2, dtype=torch.bool)


def parameters(seed):
    """One row of logits for the first token, and one for each symbol it may be: (4, 3)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def sequence_logps(theta):
    """Per-token log-probabilities of all nine sequences: (9, 2)."""
    rows = theta.log_softmax(-1)
    first, second = SEQUENCES.T
    return torch.stack([rows[0, first], rows[1 + first, second]], 1)


def exact_gradient(objective):
    theta = parameters(0).requires_grad_()
    return torch.autograd.grad(objective(sequence_logps(theta)), theta)[0]


def outcomes(group_size):
    """Indices (n, G) of the sequences of every outcome, and the probability of each (n,)."""
    index = torch.tensor(list(itertools.product(range(9), repeat=group_size)))
    return index, sequence_logps(parameters(0)).sum(1)[index].sum(1).exp()


def expected_gradient(credit, group_size, rewards=REWARDS):
    """Expectation of minus the gradient of the loss, over every outcome of a group."""
    theta = parameters(0).requires_grad_()
    logps = sequence_logps(theta)
    index, chance = outcomes(group_size)
    advantages = credit(rewards[index].flatten(), group_size)
    sampled, mask = logps[index.flatten()], MASK[index.flatten()]
    ratio = importance_ratio(sampled, sampled.detach(), mask, "sequence_sum")
    losses = clipped_surrogate(ratio, advantages, 0.2, 0.2).view(index.shape).mean(1)
    return -torch.autograd.grad((chance * losses).sum(), theta)[0]


def expected_reward(logps):
    return (logps.sum(1).exp() * REWARDS).sum()


def difference(found, expected):
    return (found - expected).abs().max().item()


@pytest.mark.parametrize("group_size", [2, 3])
def test_leave_one_out_is_unbiased(group_size):
    found = expected_gradient(leave_one_out, group_size)
    assert difference(found, exact_gradient(expected_reward)) < 1e-12


@pytest.mark.parametrize("group_size", [2, 3])
def test_the_group_mean_alone_shrinks_the_gradient_by_a_known_factor(group_size):
    found = expected_gradient(lambda r, size: group_relative(r, size, "none"), group_size)
    exact = exact_gradient(expected_reward) * (group_size - 1) / group_size
    assert difference(found, exact) < 1e-12


@pytest.mark.parametrize("group_size", [2, 3])
def test_dividing_by_the_deviation_of_the_group_is_biased_even_in_direction(group_size):
    found = expected_gradient(group_relative, group_size).flatten()
    exact = exact_gradient(expected_reward).flatten()
    assert difference(found, exact) > 1e-2
    assert torch.cosine_similarity(found, exact, dim=0) < 0.999


def reinforce(rewards, group_size):
    return rewards


def variance(credit, group_size, rewards):
    """Total variance of the gradient estimate, from the score of every sequence."""
    scores = torch.autograd.functional.jacobian(lambda x: sequence_logps(x).sum(1), parameters(0))
    index, chance = outcomes(group_size)
    advantages = credit(rewards[index].flatten(), group_size).view(index.shape)
    estimates = (advantages[..., None] * scores.flatten(1)[index]).mean(1)
    mean = (chance[:, None] * estimates).sum(0)
    return (chance * (estimates - mean).square().sum(1)).sum().item()


@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize("shift", [1.0, 2.0, -3.0])
def test_leave_one_out_varies_less_than_reinforce_where_rewards_have_an_offset(shift, group_size):
    # Around an offset of 0 the baseline of so few siblings adds more noise than it removes.
    rewards = REWARDS + shift
    assert variance(leave_one_out, group_size, rewards) < variance(reinforce, group_size, rewards)


@pytest.mark.parametrize("group_size", [2, 3])
def test_the_variance_of_leave_one_out_does_not_depend_on_the_offset(group_size):
    plain = variance(leave_one_out, group_size, REWARDS)
    for shift in (-3.0, 100.0):
        shifted = variance(leave_one_out, group_size, REWARDS + shift)
        assert shifted == pytest.approx(plain, rel=1e-10)


@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize("beta", [0.05, 1.0])
def test_k1_in_the_reward_gives_the_gradient_of_the_divergence(beta, group_size):
    ref_logps = sequence_logps(parameters(1))
    penalty = sequence_kl(sequence_logps(parameters(0)), ref_logps, MASK)
    found = expected_gradient(leave_one_out, group_size, REWARDS - beta * penalty)

    def objective(logps):
        divergence = (logps.sum(1).exp() * (logps - ref_logps).sum(1)).sum()
        return expected_reward(logps) - beta * divergence

    assert difference(found, exact_gradient(objective)) < 1e-12


def test_k3_in_the_reward_gives_another_gradient():
    ref_logps = sequence_logps(parameters(1))
    penalty = k3(sequence_logps(parameters(0)), ref_logps).sum(1)
    found = expected_gradient(leave_one_out, 2, REWARDS - penalty)

    def objective(logps):
        divergence = (logps.sum(1).exp() * (logps - ref_logps).sum(1)).sum()
        return expected_reward(logps) - divergence

    assert difference(found, exact_gradient(objective)) > 1e-2


@pytest.mark.parametrize("shift", [-3.0, 7.3, 1000.0])
def test_a_shift_of_all_rewards_changes_no_gradient(shift):
    for credit in (leave_one_out, group_relative):
        plain = expected_gradient(credit, 2)
        shifted = expected_gradient(credit, 2, REWARDS + shift)
        assert difference(shifted, plain) < 1e-12


@pytest.mark.parametrize("scale", [0.1, 2.0, 50.0])
def test_a_scale_of_all_rewards_scales_the_gradient(scale):
    plain = expected_gradient(leave_one_out, 2)
    scaled = expected_gradient(leave_one_out, 2, REWARDS * scale)
    assert difference(scaled, scale * plain) < 1e-12 * max(1.0, scale)
