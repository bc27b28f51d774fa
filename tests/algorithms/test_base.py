"""The smallest algorithm: what it need not say."""

import torch

from trl.algorithms.base import Algorithm, Needs
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
    algorithm.begin_update()
    scores = TokenScores(logps=torch.tensor([[-2.0, -5.0]]))
    terms = algorithm.loss(scores, step.batch, metrics)
    assert terms == {"nll": (torch.tensor(2.0), torch.tensor(1))}
    assert not algorithm.predictions(scores, step.batch)
    assert algorithm.end_update(Ranks(), metrics) is False
    assert not algorithm.needs.old_logps and algorithm.needs.ratio is None
