"""KTO by value: losses of answers with a label, written out one by one."""

import math

import pytest
import torch
from batches import logged, make_batches, make_group, token_values

from trl.algorithms.kto import KTO
from trl.batch import Step
from trl.distributed import Ranks
from trl.online.metrics import MetricStore
from trl.types import TokenScores

LENGTHS = [(3, 2), (1, 1), (2, 3)]
LABELS = [True, False, True]
GROUPS = [
    make_group(pair, row=row, masks=[[True] * pair[0], [False] * pair[1]])
    for row, pair in enumerate(LENGTHS)
]
FILLER = make_group((2, 2), row=9, masks=[[True] * 2, [False] * 2], is_filler=True)
LABEL_COLUMN = torch.tensor([label for label in [*LABELS, True] for _ in range(2)])


def make(**options):
    return KTO(beta=0.2, desirable_weight=1.5, undesirable_weight=0.5, **options)


def with_ratios(batch, logps):
    mismatched = batch.select_branch(1)
    rows = batch.branch_rows(1)
    return make().with_mismatched_ratios(batch, mismatched, logps[rows])


def sums(logps):
    """Log-probabilities of answers and of mismatched ones."""
    return [[float(logps[2 * row + k].detach().sum()) for k in range(2)] for row in range(3)]


def by_hand(logps, reference, estimates_kl=True):
    """The mean loss, and the KL estimate."""
    ratios = [
        [a - b for a, b in zip(own, known, strict=True)]
        for own, known in zip(sums(logps), sums(reference), strict=True)
    ]
    kl = max(0.0, sum(other for _, other in ratios) / 3) if estimates_kl else 0.0
    losses = []
    for (ratio, _), label in zip(ratios, LABELS, strict=True):
        sign, weight = (1, 1.5) if label else (-1, 0.5)
        losses.append(weight * (1 - 1 / (1 + math.exp(-sign * 0.2 * (ratio - kl)))))
    return sum(losses) / 3, kl


@pytest.mark.parametrize("estimates_kl", [True, False])
@pytest.mark.parametrize("shift", [-1.0, 1.0])  # below 0 the estimate is 0
@pytest.mark.parametrize("sizes", [[4], [1, 3]])
def test_losses_against_the_estimate_of_the_whole_step(estimates_kl, shift, sizes):
    groups, algorithm, metrics = [*GROUPS, FILLER], make(estimates_kl=estimates_kl), MetricStore()
    (whole,) = make_batches(groups)
    logps = token_values(whole)
    reference = torch.where(logps < 0, token_values(whole, 1) - shift, 0.0)
    loss, row, batches = 0.0, 0, []
    for batch in make_batches(groups, sizes, label=LABEL_COLUMN, ref_logps=reference):
        own = logps[row : row + len(batch), : batch.loss_mask.shape[1]]
        batches.append(with_ratios(batch, own))
        row += len(batch)
    row = 0
    for batch in algorithm.credit(Step(batches=batches, ranks=Ranks()), metrics).batches:
        scores = TokenScores(logps[row : row + len(batch), : batch.loss_mask.shape[1]])
        losses, total = algorithm.loss(scores, batch, metrics)["kto"]
        loss, row = loss + float(losses / total), row + len(batch)
    wanted, kl = by_hand(logps, reference, estimates_kl)
    assert loss == pytest.approx(wanted)
    assert logged(metrics)["kl"] == pytest.approx(kl)


def test_gradients_are_those_of_own_answers_alone():
    """The estimate is a constant; mismatched answers have no gradient."""
    (batch,) = make_batches(GROUPS, label=LABEL_COLUMN[:6])
    logps = token_values(batch).requires_grad_()
    batch = batch.with_columns(ref_logps=token_values(batch, 1) - 0.5)
    batch = with_ratios(batch, logps)
    (batch,) = make().credit(Step(batches=[batch], ranks=Ranks()), MetricStore()).batches
    losses, total = make().loss(TokenScores(logps), batch, MetricStore())["kto"]
    (losses / total).backward()
    kl = float(batch.columns["kl"][0])
    for row, label in enumerate(LABELS):
        ratio = float((logps[2 * row] - batch.columns["ref_logps"][2 * row]).detach().sum())
        probability = 1 / (1 + math.exp(-0.2 * (ratio - kl)))
        weight = 1.5 if label else -0.5
        slope = -weight * 0.2 * probability * (1 - probability) / 3
        assert logps.grad[2 * row, 0] == pytest.approx(slope)
        assert not logps.grad[2 * row + 1].any()


def test_metrics_are_means_over_both_labels():
    (batch,) = make_batches(GROUPS, label=LABEL_COLUMN[:6])
    logps, metrics = token_values(batch), MetricStore()
    entropies = token_values(batch, 4, 0.0, 2.0)
    batch = batch.with_columns(ref_answer_logps=torch.zeros(6), kl=torch.full((6,), 0.25))
    make().loss(TokenScores(logps, entropies=entropies), batch, metrics)
    found = logged(metrics)
    first, second, third = (own for own, _ in sums(logps))
    chosen, rejected = 0.2 * (first + third) / 2, 0.2 * second
    assert found["rewards/chosen"] == pytest.approx(chosen)
    assert found["rewards/rejected"] == pytest.approx(rejected)
    assert found["rewards/margins"] == pytest.approx(chosen - rejected)
    assert found["logps/rejected"] == pytest.approx(second) and found["kl"] == 0.25
    own = [entropies[2 * row, : LENGTHS[row][0]] for row in range(3)]
    assert found["entropy"] == pytest.approx(float(torch.cat(own).mean()))


def test_predictions_are_of_own_answers():
    (batch,) = make_batches(GROUPS, label=LABEL_COLUMN[:6], ref_answer_logps=torch.zeros(6))
    logps = token_values(batch)
    found = make().predictions(TokenScores(logps), batch)
    wanted = [[own] for own, _ in sums(logps)]
    assert [row.tolist() for row in found["logps"]] == [pytest.approx(row) for row in wanted]
    assert found["rewards"].shape == (3, 1) and make().needs.ref_logps
