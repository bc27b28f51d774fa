"""SFT by value: losses of tokens, written out one by one."""

import math

import pytest
import torch
from batches import logged, make_batches, make_group, token_values

from trl.algorithms.sft import SFT
from trl.online.metrics import MetricStore
from trl.types import TokenScores

GROUPS = [
    make_group([3], masks=[[True, False, True]], origin="a"),
    make_group([2], row=1, origin="b"),
    make_group([1], row=2),
    make_group([3], row=3, origin="a", is_filler=True),
]
TRAINED = [(0, 0), (0, 2), (1, 0), (1, 1), (2, 0)]  # row and position of tokens in the loss


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_the_sum_of_the_losses_of_tokens(loss_type):
    (batch,) = make_batches(GROUPS)
    logps = token_values(batch).requires_grad_()
    losses, total = SFT(loss_type=loss_type).loss(TokenScores(logps), batch, MetricStore())["nll"]
    losses.backward()

    wanted, gradient = 0.0, torch.zeros_like(logps)
    for row, position in TRAINED:
        logp = float(logps[row, position].detach())
        weight = math.exp(logp) if loss_type == "dft" else 1.0
        wanted -= weight * logp
        gradient[row, position] = -weight
    assert float(losses.detach()) == pytest.approx(wanted)
    assert total == len(TRAINED) and torch.allclose(logps.grad, gradient)


def test_losses_of_chunks_and_micro_batches_add_up():
    (whole,) = make_batches(GROUPS)
    logps = token_values(whole)
    terms = SFT().loss(TokenScores(logps), whole, MetricStore())["nll"]
    batches = make_batches(GROUPS, [1, 3])
    shares = []
    for batch, rows in zip(batches, [logps[:1], logps[1:]], strict=True):
        for unit in range(len(batch)):
            chunk = batch.select([unit])
            scores = TokenScores(rows[unit : unit + 1, : chunk.loss_mask.shape[1]])
            losses, total = SFT().loss(scores, chunk, MetricStore())["nll"]
            shares.append(losses / total)
    assert float(sum(shares)) == pytest.approx(float(terms[0] / terms[1]))


def test_metrics_are_means_over_tokens_and_losses_by_origin():
    (batch,) = make_batches(GROUPS)
    logps, entropies = token_values(batch), token_values(batch, 1, 0.0, 2.0)
    hits, metrics = token_values(batch, 2) > -1.5, MetricStore()
    SFT().loss(TokenScores(logps, entropies=entropies, hits=hits), batch, metrics)
    found = logged(metrics)

    def mean(values, tokens):
        return sum(float(values[token]) for token in tokens) / len(tokens)

    assert found["entropy"] == pytest.approx(mean(entropies, TRAINED))
    assert found["mean_token_accuracy"] == pytest.approx(mean(hits, TRAINED))
    assert found["loss/a"] == pytest.approx(-mean(logps, TRAINED[:2]))
    assert found["loss/b"] == pytest.approx(-mean(logps, TRAINED[2:4]))
    assert len(found) == 4


def test_entropies_are_recorded_only_where_they_were_computed():
    (batch,) = make_batches([make_group([2])])
    metrics = MetricStore()
    SFT().loss(TokenScores(token_values(batch)), batch, metrics)
    assert not logged(metrics) and not SFT().needs.entropies
