"""The smallest algorithm: what it need not say; the clipped loss against a loop over entries."""

import pytest
import torch
from credit_steps import credit_step, recorded

from trl.algorithms.base import Algorithm, Needs, clipped_losses, ratio_mask
from trl.batch import Batch, Branch, Group, Step, with_totals
from trl.distributed import Ranks
from trl.online.metrics import MetricStore
from trl.ops.masking import masked_sum
from trl.types import Prefix, TokenScores


class Likelihood(Algorithm[TokenScores]):
    needs = Needs()

    def loss(self, scores, batch, metrics):
        return {"nll": (-masked_sum(scores.logps, batch.loss_mask), batch.totals.tokens)}


def test_an_algorithm_says_its_needs_and_its_loss_alone():
    group = Group(Prefix([1]), (Branch([2, 3], [True, False]),), row=0)
    batches = with_totals([Batch.of([group])], Ranks())
    step = Step(batches=batches, ranks=Ranks())
    algorithm, metrics = Likelihood(), MetricStore()

    assert algorithm.credit(step, metrics) is step
    algorithm.discard_update()
    scores = TokenScores(logps=torch.tensor([[-2.0, -5.0]]))
    terms = algorithm.loss(scores, step.batch, metrics)
    assert terms == {"nll": (torch.tensor(2.0), torch.tensor(1))}
    assert not algorithm.predictions(scores, step.batch)
    assert algorithm.end_update(Ranks(), metrics) is False
    assert not algorithm.needs.old_logps and algorithm.needs.ratio is None


def batch_with(ratio, advantages, **columns):
    step = credit_step([2, 1], [0.0, 0.0], group_size=2)
    return step.batch.with_columns(
        ratio=torch.tensor(ratio), advantages=torch.tensor(advantages), **columns
    )


def slow(ratio, advantage, delta=None):
    clipped = min(max(ratio, 0.9), 1.3)
    unclipped = ratio if delta is None else min(ratio, delta)
    return -min(unclipped * advantage, clipped * advantage)


@pytest.mark.parametrize("delta", [None, 1.6])
def test_losses_of_tokens(delta):
    ratio, advantages = [[0.5, 1.2], [2.0, 1.0]], [1.0, -2.0]
    batch = batch_with(ratio, advantages, weights=torch.tensor([[1.0, 3.0], [0.5, 1.0]]))
    metrics = MetricStore()
    found = clipped_losses(batch, ratio_mask(batch), (0.1, 0.3), metrics, delta)
    plain = [[slow(r, a, delta) for r in row] for row, a in zip(ratio, advantages, strict=True)]
    expected = torch.tensor(plain) * batch.columns["weights"]
    assert torch.allclose(found, expected)
    # The second completion has one token, so the ratio of 1 there does not count.
    assert recorded(metrics)["clip_ratio/region_mean"] == 0.0


def test_losses_of_completions_and_what_is_clipped():
    batch = batch_with([[0.5], [2.0]], [-1.0, 1.0])
    metrics = MetricStore()
    mask = ratio_mask(batch)
    assert mask.tolist() == [[True], [True]]
    found = clipped_losses(batch, mask, (0.1, 0.3), metrics)
    assert found.flatten().tolist() == pytest.approx([slow(0.5, -1.0), slow(2.0, 1.0)])
    shares = recorded(metrics)
    assert shares["clip_ratio/low_mean"] == shares["clip_ratio/high_mean"] == 0.5
