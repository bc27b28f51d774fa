"""Reward models by value: losses of pairs of answers, written out pair by pair."""

import math

import pytest
import torch
from batches import logged, make_batches, make_group

from trl.algorithms.reward import RewardModel
from trl.online.metrics import MetricStore

SCORES = [[0.5, -1.0, 2.0], [0.3, 0.9], [-2.0, -2.0]]
RANKS = [[1, 3, 2], [1, 2], [1, 1]]  # answers of equal rank are no pair
MARGINS = [0.1, 0.0, 0.4]


def make_batch(filler=False):
    groups = [make_group([1] * len(scores), row=row) for row, scores in enumerate(SCORES)]
    facts = [*zip(SCORES, RANKS, MARGINS, strict=True)]
    if filler:
        groups.append(make_group([1, 1], row=9, is_filler=True))
        facts.append(([100.0, -100.0], [2, 1], 0.0))
    (batch,) = make_batches(
        groups,
        rank=torch.tensor([rank for _, ranks, _ in facts for rank in ranks]),
        margin=torch.tensor([margin for scores, _, margin in facts for _ in scores]),
    )
    return batch, torch.tensor([score for scores, _, _ in facts for score in scores])


def pairs():
    """Scores of the better and the worse answer, and the margin, of each pair."""
    return [
        (scores[i], scores[j], margin)
        for scores, ranks, margin in zip(SCORES, RANKS, MARGINS, strict=True)
        for i in range(len(scores))
        for j in range(len(scores))
        if ranks[i] < ranks[j]
    ]


@pytest.mark.parametrize("coefficient", [None, 0.01])
@pytest.mark.parametrize("filler", [False, True])
def test_losses_of_all_pairs_of_a_group(coefficient, filler):
    batch, scores = make_batch(filler)
    algorithm = RewardModel(center_rewards_coefficient=coefficient)
    losses, total = algorithm.loss(scores, batch, MetricStore())["pairs"]
    wanted = [
        math.log1p(math.exp(-(better - worse - margin)))
        + (coefficient or 0.0) * (better + worse) ** 2
        for better, worse, margin in pairs()
    ]
    assert total == len(wanted) == 4
    assert float(losses) == pytest.approx(sum(wanted), rel=1e-6)


def test_groups_of_a_chunk_add_up():
    batch, scores = make_batch()
    losses, total = RewardModel().loss(scores, batch, MetricStore())["pairs"]
    parts = []
    for unit, rows in enumerate(batch.units):
        chunk = batch.select_units(range(unit, unit + 1))
        part, same = RewardModel().loss(scores[rows.start : rows.stop], chunk, MetricStore())[
            "pairs"
        ]
        assert same is total or same == total
        parts.append(float(part))
    assert sum(parts) == pytest.approx(float(losses)) and RewardModel().needs.whole_groups


def test_metrics_and_predictions():
    batch, scores = make_batch(filler=True)
    metrics = MetricStore()
    RewardModel().loss(scores, batch, metrics)
    found, known = logged(metrics), pairs()
    assert found["accuracy"] == sum(better > worse for better, worse, _ in known) / 4
    margins = [better - worse for better, worse, _ in known]
    assert found["margin"] == pytest.approx(sum(margins) / 4)
    assert found["mean_reward"] == pytest.approx(sum(map(sum, SCORES)) / 7)
    assert (found["min_reward"], found["max_reward"]) == (-2.0, 2.0)
    predictions = RewardModel().predictions(scores, batch)["scores"]
    assert predictions.shape == (4, 3) and predictions[1, :2].tolist() == pytest.approx([0.3, 0.9])
