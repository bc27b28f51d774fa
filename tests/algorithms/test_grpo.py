"""GRPO by value: credit and losses against loops over single tokens."""

import math
import statistics

import numpy as np
import pytest
import torch
from credit_steps import credit_step, micro_batches, noise, recorded

from trl.algorithms.entropy_bonus import EntropyController
from trl.algorithms.grpo import GRPO
from trl.distributed import Ranks
from trl.online.metrics import MetricStore
from trl.types import RewardTable, TokenScores

LENGTHS = [2, 3, 1, 4]
REWARDS = [1.0, 0.5, -2.0, 3.0]
ADVANTAGES = [1.0, -1.0, 0.5, -2.0]
LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
CLIP = (0.1, 0.3)


def test_what_it_needs():
    plain = GRPO().needs
    assert plain.ratio == "token" and plain.only_advantages
    assert not (plain.old_logps or plain.ref_logps or plain.entropies or plain.credit_entropies)
    assert GRPO(importance_sampling_level="sequence").needs.ratio == "sequence_mean"
    token_losses = [GRPO(loss_type=x).needs.token_losses for x in ("cispo", "vespo", "dapo")]
    assert token_losses == [True, True, False]
    penalized = GRPO(beta=0.1).needs
    assert penalized.ref_logps and not penalized.only_advantages
    bonus = GRPO(entropy=EntropyController(coefficient=0.1)).needs
    assert bonus.entropies and not bonus.only_advantages
    assert GRPO(top_entropy_quantile=0.5).needs.credit_entropies


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_credit(scale):
    step = credit_step(LENGTHS, REWARDS, 2)
    found = GRPO(scale_rewards=scale).credit(step, MetricStore()).batch.columns["advantages"]
    expected = []
    for group in (REWARDS[:2], REWARDS[2:]):
        deviations = {
            "group": statistics.stdev(group) + 1e-4,
            "batch": statistics.stdev(REWARDS) + 1e-4,
            "none": 1.0,
        }
        expected += [(r - statistics.fmean(group)) / deviations[scale] for r in group]
    assert found.tolist() == pytest.approx(expected)


def test_functions_may_be_normalized_before_they_are_added():
    scores = [[1.0, 10.0], [2.0, 0.0], [3.0, 5.0], [0.0, 9.0]]
    table = RewardTable(
        per_function=torch.tensor(scores),
        weights=torch.tensor([1.0, 0.5]),
        total=torch.tensor([a + 0.5 * b for a, b in scores]),
        names=("a", "b"),
        group_size=4,
    )
    step = credit_step(LENGTHS, REWARDS, 4, table)
    algorithm = GRPO(multi_objective_aggregation="normalize_then_sum")
    found = algorithm.credit(step, MetricStore()).batch.columns["advantages"]
    columns = [[row[i] for row in scores] for i in range(2)]
    normal = [
        [(x - statistics.fmean(column)) / (statistics.stdev(column) + 1e-4) for x in column]
        for column in columns
    ]
    total = [a + 0.5 * b for a, b in zip(*normal, strict=True)]
    deviation = statistics.stdev(total) + 1e-4
    assert found.tolist() == pytest.approx([x / deviation for x in total], abs=1e-5)


def test_tokens_of_high_entropy_are_chosen_of_the_whole_rollout_batch():
    entropies = noise(5, 4, 4).abs()
    step = credit_step(LENGTHS, REWARDS, 2, entropies=entropies)
    found = GRPO(top_entropy_quantile=0.3).credit(step, MetricStore()).batch
    counted = [float(x) for i, n in enumerate(LENGTHS) for x in entropies[i, :n]]
    threshold = float(np.quantile(counted, 0.7))
    for row, length in enumerate(LENGTHS):
        expected = [float(x) >= threshold for x in entropies[row, :length]]
        assert found.columns["objective_mask"][row, :length].tolist() == expected
        assert not found.columns["objective_mask"][row, length:].any()
    assert "entropies" not in found.columns


# --- Losses ---


def objective(kind, ratio, logp, advantage, phi, delta=None):
    if kind == "cispo":
        return -min(ratio, 1.2) * advantage * logp
    if kind == "vespo":
        return -phi * advantage * logp
    if kind == "sapo":
        tau = 0.8 if advantage > 0 else 1.1
        return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
    clipped = min(max(ratio, 1 - CLIP[0]), 1 + CLIP[1])
    ratio = ratio if delta is None else min(ratio, delta)
    return -min(ratio * advantage, clipped * advantage)


def total_of(kind, row, lengths, longest):
    tokens = sum(lengths)
    return {
        "grpo": len(lengths) * lengths[row],
        "sapo": len(lengths) * lengths[row],
        "dr_grpo": len(lengths) * longest,
        "luspo": len(lengths),
    }.get(kind, tokens)


def slow_loss(kind, step, delta=None, keep=None):
    """The loss of the whole rollout batch as one micro-batch, one token after the other."""
    columns, found = step.batch.columns, 0.0
    for row, length in enumerate(LENGTHS):
        advantage = ADVANTAGES[row]
        differences = [
            float(columns["logps"][row, t] - columns["old_logps"][row, t]) for t in range(length)
        ]
        k, decay = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        product = math.exp(sum(differences))
        phi = product**k * math.exp(decay * (1 - product))
        for t in range(length):
            if keep is not None and not keep[row][t]:
                continue
            ratio = float(columns["ratio"][row, min(t, columns["ratio"].shape[1] - 1)])
            loss = objective(kind, ratio, float(columns["logps"][row, t]), advantage, phi, delta)
            found += loss / total_of(kind, row, LENGTHS, longest=8)
    return found


def step_with_ratios(level="token", **columns):
    logps, old_logps = noise(1, 4, 4) - 1, noise(2, 4, 4) - 1
    ratio = (logps - old_logps).exp()
    if level == "sequence":
        means = [(logps - old_logps)[i, :n].mean() for i, n in enumerate(LENGTHS)]
        ratio = torch.stack(means).exp()[:, None]
    return credit_step(
        LENGTHS,
        REWARDS,
        2,
        ratio=ratio,
        logps=logps,  # of the forward; no column of a real batch
        old_logps=old_logps,
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
        **columns,
    )


def fast_loss(algorithm, step, cut=1, metrics=None, entropies=None):
    """The sum of the shares of micro-batches."""
    found, first = 0.0, 0
    for batch in micro_batches(step, cut):
        rows = slice(first, first + len(batch))
        width = batch.loss_mask.shape[1]
        scores = TokenScores(
            logps=batch.columns["logps"],
            entropies=None if entropies is None else entropies[rows, :width],
        )
        first = rows.stop
        for term_sum, total in algorithm.loss(scores, batch, metrics or MetricStore()).values():
            found += float(term_sum / total)
    return found


def made(kind, **changes):
    settings = {"clip_range": CLIP, "max_completion_length": 8, "cispo_ratio_max": 1.2}
    settings |= {"sapo_temperature_pos": 0.8, "sapo_temperature_neg": 1.1}
    return GRPO(loss_type=kind, **(settings | changes))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_losses(kind, level):
    """However the rollout batch is cut into micro-batches, except for bnpo."""
    step, algorithm = step_with_ratios(level), made(kind)
    expected = slow_loss(kind, step)
    assert fast_loss(algorithm, step) == pytest.approx(expected)
    if kind != "bnpo":
        for cut in (2, 4):
            assert fast_loss(algorithm, step, cut) == pytest.approx(expected)


def test_bnpo_averages_the_means_of_micro_batches():
    step = step_with_ratios()
    means = []
    for rows in (slice(0, 2), slice(2, 4)):
        losses = [
            objective("bnpo", float(step.batch.columns["ratio"][row, t]), 0.0, ADVANTAGES[row], 0.0)
            for row in range(4)[rows]
            for t in range(LENGTHS[row])
        ]
        means.append(statistics.fmean(losses))
    assert fast_loss(made("bnpo"), step, cut=2) == pytest.approx(statistics.fmean(means))


def test_delta_bounds_the_unclipped_ratio():
    step = step_with_ratios()
    found = fast_loss(made("dapo", delta=1.2), step)
    assert found == pytest.approx(slow_loss("dapo", step, delta=1.2))
    assert found != pytest.approx(slow_loss("dapo", step))


@pytest.mark.parametrize("corrected", [True, False])
def test_the_penalty_is_that_of_all_tokens(corrected):
    reference, mask = noise(3, 4, 4) - 1, torch.zeros(4, 4, dtype=torch.bool)
    step, metrics = step_with_ratios(ref_logps=reference, objective_mask=mask), MetricStore()
    algorithm = made("dapo", beta=0.5, use_bias_correction_kl=corrected)
    columns, penalties = step.batch.columns, []
    for row, length in enumerate(LENGTHS):
        for t in range(length):
            gap = float(reference[row, t] - columns["logps"][row, t])
            factor = float(columns["ratio"][row, t]) if corrected else 1.0
            penalties.append(factor * (math.exp(gap) - gap - 1))
    found = fast_loss(algorithm, step, metrics=metrics)
    assert found == pytest.approx(0.5 * statistics.fmean(penalties))
    assert recorded(metrics)["kl"] == pytest.approx(statistics.fmean(penalties))


def test_far_completions_of_negative_advantage_are_left_out():
    """By the log-probabilities that the engine reported, where it does."""
    step = step_with_ratios()
    columns = step.batch.columns
    far = columns["logps"] + 1.0
    near = columns["logps"] + 0.01
    algorithm = made("dapo", off_policy_mask_threshold=0.02)
    without = [[advantage >= 0] * 4 for advantage in ADVANTAGES]
    expected = slow_loss("dapo", step), slow_loss("dapo", step, keep=without)
    for logps, loss in ((near, expected[0]), (far, expected[1])):
        reported = step.with_batches([step.batch.with_columns(sampling_logps=logps)])
        assert fast_loss(algorithm, reported) == pytest.approx(loss)


def test_the_bonus_and_what_its_controller_sees():
    controller = EntropyController(coefficient=0.3)
    step, entropies, metrics = step_with_ratios(), noise(6, 4, 4).abs(), MetricStore()
    counted = [float(x) for i, n in enumerate(LENGTHS) for x in entropies[i, :n]]
    algorithm, plain = made("dapo", entropy=controller), fast_loss(made("dapo"), step)
    algorithm.discard_update()
    found = fast_loss(algorithm, step, 2, metrics, entropies)
    assert found == pytest.approx(plain - 0.3 * statistics.fmean(counted))
    assert algorithm.end_update(Ranks(), metrics) is False
    assert controller.measured == pytest.approx(statistics.fmean(counted))
    logged = recorded(metrics)
    assert logged["policy_loss"] == pytest.approx(plain)
    assert logged["entropy_coef"] == pytest.approx(0.3)


def test_vespo_takes_weights_into_its_ratio():
    weights = 1 + noise(7, 4, 4).abs()
    plain = step_with_ratios()
    shifted = plain.batch.columns["old_logps"] - weights.log()
    expected = plain.with_batches([plain.batch.with_columns(old_logps=shifted)])
    found = plain.with_batches([plain.batch.with_columns(weights=weights)])
    metrics = MetricStore()
    assert fast_loss(made("vespo"), found, metrics=metrics) == pytest.approx(
        slow_loss("vespo", expected)
    )
    assert recorded(metrics).keys() == {"vespo/phi_seq_mean"}
