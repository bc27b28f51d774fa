"""Online DPO by value: credit and loss against loops over pairs."""

import dataclasses
import math
import statistics

import pytest
import torch
from credit_steps import credit_step, micro_batches, noise, recorded

from trl.algorithms.online_dpo import OnlineDPO
from trl.online.metrics import MetricStore
from trl.types import TokenScores

LENGTHS = [2, 3, 1, 4, 2, 2]
REWARDS = [1.0, 2.0, 0.5, 0.5, math.nan, 3.0]


def test_what_it_needs():
    needs = OnlineDPO().needs
    assert needs.ref_logps and needs.whole_groups
    assert not needs.old_logps and not needs.only_advantages


def test_credit_prefers_the_first_of_equals_and_skips_unscored_pairs():
    metrics, step = MetricStore(), credit_step(LENGTHS, REWARDS, 2)
    columns = OnlineDPO().credit(step, metrics).batch.columns
    assert columns["advantages"].tolist() == [-1.0, 1.0, 1.0, -1.0, 0.0, 0.0]
    assert columns["rewards"].nan_to_num(-9).tolist() == [1.0, 2.0, 0.5, 0.5, -9, 3.0]
    assert recorded(metrics) == {
        "objective/scores": pytest.approx(7.0 / 5),
        "objective/scores_margin": pytest.approx(0.5),
        "val/contain_eos_token": 1.0,
    }


def test_completions_that_were_cut_off_lose_the_penalty():
    plain = credit_step(LENGTHS, REWARDS, 2)
    ended = torch.tensor([True, False, True, True, True, True])
    step = dataclasses.replace(plain, table=dataclasses.replace(plain.rewards, ended=ended))
    metrics = MetricStore()
    columns = OnlineDPO(missing_eos_penalty=1.5).credit(step, metrics).batch.columns
    assert columns["rewards"][:2].tolist() == [1.0, 0.5]
    assert columns["advantages"][:2].tolist() == [1.0, -1.0]
    assert recorded(metrics)["val/contain_eos_token"] == pytest.approx(5 / 6)


@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_loss(kind, cut):
    """Unscored pairs have no loss, and count in the mean all the same."""
    ours, theirs, beta = noise(1, 6, 4) - 1, noise(2, 6, 4) - 1, 0.4
    algorithm = OnlineDPO(beta=beta, loss_type=kind)
    step = credit_step(LENGTHS, REWARDS, 2, ref_logps=theirs)
    batch = algorithm.credit(step, MetricStore()).batch
    step = step.with_batches(
        [batch.with_columns(logps=ours)]
    )  # of the forward; no column of a real batch
    metrics, found = MetricStore(), 0.0
    for part in micro_batches(step, cut):
        scores = TokenScores(logps=part.columns["logps"])
        (term,) = algorithm.loss(scores, part, metrics).values()
        found += float(term[0] / term[1])

    sums = [float((ours - theirs)[i, :n].sum()) for i, n in enumerate(LENGTHS)]
    margins = [sums[1] - sums[0], sums[2] - sums[3], sums[4] - sums[5]]
    if kind == "sigmoid":
        losses = [math.log(1 + math.exp(-beta * margin)) for margin in margins]
    else:
        losses = [(margin - 1 / (2 * beta)) ** 2 for margin in margins]
    assert found == pytest.approx(sum(losses[:2]) / 3)
    logged = recorded(metrics)
    assert logged["rewards/margins"] == pytest.approx(beta * statistics.fmean(margins), abs=1e-6)
    assert logged["objective/kl"] == pytest.approx(statistics.fmean(sums), abs=1e-6)
