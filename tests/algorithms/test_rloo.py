"""RLOO by value: credit and loss against loops over completions."""

import math

import pytest
import torch
from credit_steps import credit_step, micro_batches, noise, recorded

from trl.algorithms.rloo import RLOO
from trl.online.metrics import MetricStore
from trl.types import TokenScores

LENGTHS = [2, 3, 1, 2, 4, 1]
REWARDS = [1.0, 0.5, -2.0, 3.0, 3.0, math.nan]


def leave_one_out(rewards, size=3):
    found = []
    for row, reward in enumerate(rewards):
        start = row // size * size
        others = [rewards[i] for i in range(start, start + size) if i != row]
        others = [other for other in others if other == other]
        is_alone = reward != reward or not others
        found.append(0.0 if is_alone else reward - sum(others) / len(others))
    return found


def test_what_it_needs():
    plain, penalized = RLOO().needs, RLOO(beta=0.1).needs
    assert not plain.old_logps and not plain.ref_logps
    assert penalized.old_logps and penalized.ref_logps
    assert plain.ratio == "sequence_sum" and plain.only_advantages


@pytest.mark.parametrize("clip", [None, (-1.0, 2.0)])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_credit(beta, clip):
    old, reference = noise(1, 6, 4), noise(2, 6, 4)
    step = credit_step(LENGTHS, REWARDS, 3, old_logps=old, ref_logps=reference)
    metrics = MetricStore()
    found = RLOO(beta=beta, reward_clip_range=clip).credit(step, metrics)

    divergences = [float((old - reference)[i, :n].sum()) for i, n in enumerate(LENGTHS)]
    low, high = clip or (-math.inf, math.inf)
    rewards = [r if r != r else min(max(r, low), high) for r in REWARDS]
    rewards = [r - beta * d for r, d in zip(rewards, divergences, strict=True)]
    assert found.batch.columns["advantages"].tolist() == pytest.approx(leave_one_out(rewards))
    logged = recorded(metrics)
    if beta:
        assert logged == {"kl": pytest.approx(sum(divergences) / sum(LENGTHS))}
    else:
        assert not logged


def test_advantages_may_be_normalized():
    step = credit_step(LENGTHS, REWARDS, 3)
    plain = RLOO().credit(step, MetricStore()).batch.columns["advantages"]
    found = RLOO(normalize_advantages=True).credit(step, MetricStore()).batch
    deviation = plain[:5].std() + 1e-4  # the last completion has no reward
    assert torch.allclose(found.columns["advantages"], plain / deviation)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_loss(cut):
    """However the rollout batch is cut, shares add up to the mean over completions."""
    ratio = 1 + noise(3, 6, 1, scale=0.5)
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0, -2.0, 0.0])
    weights = 1 + noise(4, 6, 1)
    step = credit_step(LENGTHS, REWARDS, 3, ratio=ratio, advantages=advantages, weights=weights)
    algorithm = RLOO(clip_range=(0.1, 0.3))
    total = 0.0
    for batch in micro_batches(step, cut):
        scores = TokenScores(logps=torch.zeros(batch.loss_mask.shape))
        (term,) = algorithm.loss(scores, batch, MetricStore()).values()
        total += float(term[0] / term[1])
    expected = 0.0
    for r, a, w in zip(
        ratio[:, 0].tolist(), advantages.tolist(), weights[:, 0].tolist(), strict=True
    ):
        expected -= w * min(r * a, min(max(r, 0.9), 1.3) * a) / 6
    assert total == pytest.approx(expected)


def test_completions_without_a_token_in_the_loss_do_not_count():
    step = credit_step([2, 2], [1.0, 2.0], 2, ratio=torch.ones(2, 1), advantages=torch.ones(2))
    batch = step.batch
    batch.loss_mask[1] = False
    (batch,) = micro_batches(step.with_batches([batch]))
    (term,) = RLOO().loss(TokenScores(logps=torch.zeros(2, 2)), batch, MetricStore()).values()
    assert (float(term[0]), float(term[1])) == (-1.0, 1.0)
