"""PPO by value: credit and losses against loops over tokens."""

import dataclasses
import math
import statistics

import pytest
import torch
from credit_steps import credit_step, micro_batches, noise, recorded

from trl.algorithms.ppo import PPO, EarlyStop
from trl.distributed import Ranks
from trl.online.metrics import MetricStore
from trl.types import TokenScores

LENGTHS = [2, 3, 1, 4]
REWARDS = [1.0, 0.5, math.nan, 3.0]
SCORED = (0, 1, 3)  # rows that have a reward


def credited(metrics=None, **options):
    step = credit_step(
        LENGTHS,
        REWARDS,
        1,
        old_logps=noise(1, 4, 4) - 1,
        ref_logps=noise(2, 4, 4) - 1,
        values=noise(3, 4, 4),
    )
    algorithm = PPO(**options)
    return algorithm, algorithm.credit(step, metrics or MetricStore())


def penalty(columns, row, t, beta=0.05, kind="k1"):
    gap = float(columns["old_logps"][row, t] - columns["ref_logps"][row, t])
    return -beta * (gap if kind == "k1" else math.exp(-gap) - 1 + gap)


def slow_credit(columns, beta=0.05, kind="k1", gamma=1.0, lam=0.95, whitens=False):
    """Advantages, not scaled, and returns of the tokens of rows that have a reward."""
    rewards = {}
    for row in SCORED:
        rewards[row] = [penalty(columns, row, t, beta, kind) for t in range(LENGTHS[row])]
        rewards[row][-1] += REWARDS[row]
    if whitens:
        of_tokens = [r for row in rewards.values() for r in row]
        mean, deviation = statistics.fmean(of_tokens), statistics.stdev(of_tokens)
        for row in SCORED:
            rewards[row] = [(r - mean) / deviation + mean for r in rewards[row]]
    advantages, returns = [], []
    for row in SCORED:
        values = [*columns["values"][row, : LENGTHS[row]].tolist(), 0.0]
        for t in range(LENGTHS[row]):
            found = 0.0
            for k in range(t, LENGTHS[row]):
                error = rewards[row][k] + gamma * values[k + 1] - values[k]
                found += (gamma * lam) ** (k - t) * error
            advantages.append(found)
            returns.append(found + values[t])
    return advantages, returns


def of_scored(column):
    return [float(x) for row in SCORED for x in column[row, : LENGTHS[row]]]


@pytest.mark.parametrize(
    ("options", "slow"),
    [
        ({}, {}),
        ({"gamma": 0.9, "lam": 0.5}, {"gamma": 0.9, "lam": 0.5}),
        ({"kl_estimator": "k3", "beta": 0.3}, {"kind": "k3", "beta": 0.3}),
        ({"beta": 0.0}, {"beta": 0.0}),
        ({"whiten_rewards": True}, {"whitens": True}),
    ],
)
def test_credit(options, slow):
    _, step = credited(**options)
    columns = step.batch.columns
    advantages, returns = slow_credit(columns, **slow)
    mean, deviation = statistics.fmean(advantages), statistics.stdev(advantages)
    scaled = [(a - mean) / deviation for a in advantages]
    assert of_scored(columns["advantages"]) == pytest.approx(scaled, abs=1e-6)
    assert of_scored(columns["returns"]) == pytest.approx(returns, abs=1e-6)
    assert not columns["advantages"][2].any(), "it could not be scored"


def test_what_credit_records():
    metrics = MetricStore()
    _, step = credited(metrics, beta=0.2)
    columns = step.batch.columns
    sums = [sum(penalty(columns, i, t, 0.2) for t in range(n)) for i, n in enumerate(LENGTHS)]
    entropies = [-float(columns["old_logps"][i, :n].sum()) for i, n in enumerate(LENGTHS)]
    expected = {
        "episode": 4,
        "objective/scores": 1.5,
        "val/num_eos_tokens": 4.0,
        "objective/entropy": statistics.fmean(entropies),
        "objective/kl": -statistics.fmean(sums) / 0.2,
        "objective/non_score_reward": statistics.fmean(sums),
        "objective/rlhf_reward": statistics.fmean([REWARDS[i] + sums[i] for i in SCORED]),
    }
    assert recorded(metrics) == {k: pytest.approx(v, abs=1e-6) for k, v in expected.items()}


def test_episodes_add_up_in_training_alone():
    algorithm, step = credited()
    algorithm.credit(step, MetricStore())
    assert algorithm.episodes == 8
    evaluation = step.with_batches([dataclasses.replace(step.batch, mode="eval")])
    algorithm.credit(evaluation, MetricStore())
    assert algorithm.episodes == 8


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_losses(cut):
    """Each divided by all tokens, also those without a reward, which have no loss."""
    options = {"clip_range": (0.1, 0.3), "cliprange_value": 0.15, "vf_coef": 0.7}
    algorithm, step = credited(entropy_coef=0.2, **options)
    logps, values = noise(4, 4, 4) - 1, noise(5, 4, 4)
    ratio = (logps - step.batch.columns["old_logps"]).exp()
    # `logps` and `new_values` are of the forward; no columns of a real batch.
    batch = step.batch.with_columns(ratio=ratio, logps=logps, new_values=values)
    step, metrics, found = step.with_batches([batch]), MetricStore(), 0.0
    algorithm.discard_update()
    for part in micro_batches(step, cut):
        new = part.columns["new_values"]
        scores = TokenScores(
            logps=part.columns["logps"], values=new, entropies=torch.full_like(new, 1.5)
        )
        for term_sum, total in algorithm.loss(scores, part, metrics).values():
            found += float(term_sum / total)

    columns, tokens = batch.columns, sum(LENGTHS)
    policy, value, distance = 0.0, 0.0, 0.0
    for row in SCORED:
        for t in range(LENGTHS[row]):
            a, r = float(columns["advantages"][row, t]), float(ratio[row, t])
            policy -= min(r * a, min(max(r, 0.9), 1.3) * a) / tokens
            old, new = float(columns["values"][row, t]), float(values[row, t])
            near = old + min(max(new - old, -0.15), 0.15)
            target = float(columns["returns"][row, t])
            value += 0.5 * max((new - target) ** 2, (near - target) ** 2) / tokens
            distance += 0.5 * math.log(r) ** 2
    counted = sum(LENGTHS[row] for row in SCORED)
    assert found == pytest.approx(policy + 0.7 * value - 0.2 * 1.5 * counted / tokens, abs=1e-6)
    logged = recorded(metrics)
    assert logged["loss/policy_avg"] == pytest.approx(policy, abs=1e-6)
    assert logged["loss/value_avg"] == pytest.approx(value, abs=1e-6)
    assert logged["policy/approxkl_avg"] == pytest.approx(distance / counted, abs=1e-6)


def test_what_an_update_moved_is_counted():
    """Every value rose by more than its clip width, and every log-probability by 0.1.

    That is too much for tokens that are to become likelier. Each token has the weight 2, which is
    that of the policy's loss alone.
    """
    algorithm, step = credited(clip_range=(0.2, 0.05))
    columns, mask = step.batch.columns, step.batch.loss_mask.clone()
    mask[2] = False
    batch = step.batch.with_columns(
        ratio=torch.full((4, 4), 0.1, dtype=torch.float64).exp(),
        weights=torch.full((4, 4), 2.0, dtype=torch.float64),
    )
    scores = TokenScores(logps=columns["old_logps"] + 0.1, values=columns["values"] + 0.5)
    metrics = MetricStore()
    algorithm.loss(scores, micro_batches(step.with_batches([batch]))[0], metrics)
    found = recorded(metrics)
    old, returns = columns["values"][mask].tolist(), columns["returns"][mask].tolist()
    # The clipped value, 0.2 above the old one, is further off than one 0.5 above it.
    is_worse = [r > v + 0.35 for v, r in zip(old, returns, strict=True)]
    assert 0 < sum(is_worse) < len(is_worse)
    credit, most = columns["advantages"][mask], math.exp(0.1)
    losses = torch.where(credit > 0, -1.05 * credit, -most * credit)
    off = [max((v + x - r) ** 2 for x in (0.2, 0.5)) for v, r in zip(old, returns, strict=True)]
    expected = {
        "loss/policy_avg": 2 * float(losses.sum()) / sum(LENGTHS),
        "loss/value_avg": 0.5 * sum(off) / sum(LENGTHS),
        "val/clipfrac_avg": statistics.fmean(is_worse),
        "policy/approxkl_avg": 0.5 * 0.1**2,
        "policy/clipfrac_avg": float((credit > 0).float().mean()),
        "val/ratio": most,
        "val/ratio_var": (most - 1) ** 2,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_an_update_that_moved_too_far_ends_the_rollout_batch():
    """Its chunks count together, and those from before it began again not at all."""
    stop, metrics = EarlyStop(target_kl=0.5), MetricStore()
    stop.observe(torch.tensor(100.0), torch.tensor(1))
    stop.discard_update()
    stop.observe(torch.tensor(2.0), torch.tensor(1))
    stop.observe(torch.tensor(0.0), torch.tensor(4))
    assert stop.end_update(Ranks(), metrics) is False, "2 / 5"
    stop.observe(torch.tensor(2.0), torch.tensor(3))
    assert stop.end_update(Ranks(), metrics) is True, "2 / 3"
    assert recorded(metrics) == {"policy/early_stops": 0.5}
    assert stop.end_update(Ranks(), metrics) is False and not recorded(metrics)


def test_without_a_target_nothing_stops():
    stop, metrics = EarlyStop(), MetricStore()
    stop.observe(torch.tensor(100.0), torch.tensor(1))
    assert stop.end_update(Ranks(), metrics) is False and not recorded(metrics)
