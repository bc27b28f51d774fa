"""Scores without gradient, against plain forwards of single rows."""

from contextlib import nullcontext

import pytest
import torch
from tiny import tiny_model

from trl.algorithms.base import Needs
from trl.batch import Batch, Branch, Group, Step
from trl.distributed import Ranks
from trl.memory.adaptive_batch import AdaptiveBatch
from trl.models.reference import FrozenCopy
from trl.models.scorer import Scorer
from trl.online.guard import FiniteGuard, NonFiniteError
from trl.trainer.base.annotate import Annotator
from trl.types import Prefix

PROMPTS = [[5, 6, 7], [8, 9]]
ANSWERS = [[[10, 11], [12]], [[13, 14, 15], [16, 17]]]


def annotator(reference=None, chunks=lambda batch: [batch], size=None):
    model = tiny_model()
    return Annotator(
        policy=lambda: model,
        scorer=Scorer(pad_id=0, temperature=1.0, device=torch.device("cpu")),
        guard=FiniteGuard(0, lambda value: [value]),
        chunks=chunks,
        size=AdaptiveBatch("scoring", size),
        autocast=nullcontext,
        reference=reference,
    )


def step(keeps_groups=False, **columns):
    groups = [
        Group(Prefix(prompt), tuple(Branch(ids, [True] * len(ids)) for ids in answers), row)
        for row, (prompt, answers) in enumerate(zip(PROMPTS, ANSWERS, strict=True))
    ]
    return Step(batches=[Batch.of(groups, columns, keeps_groups=keeps_groups)], ranks=Ranks())


def plain(model):
    """Log-probabilities and entropies, one row at a time: (4, 3) each."""
    logps, entropies = torch.zeros(2, 4, 3)
    rows = [
        (prompt, ids) for prompt, answers in zip(PROMPTS, ANSWERS, strict=True) for ids in answers
    ]
    for row, (prompt, ids) in enumerate(rows):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        every = logits.log_softmax(-1)
        logps[row, : len(ids)] = every[torch.arange(len(ids)), torch.tensor(ids)]
        entropies[row, : len(ids)] = -(every.exp() * every).sum(-1)
    return logps, entropies


@pytest.mark.parametrize("size", [None, 1, 3])
@pytest.mark.parametrize("keeps_groups", [False, True])
def test_columns_are_those_of_single_rows(size, keeps_groups):
    reference = FrozenCopy(tiny_model(seed=1))
    needs = Needs(old_logps=True, ref_logps=True, credit_entropies=True)
    by_unit = lambda batch: [batch.select(unit) for unit in batch.units]  # noqa: E731
    for chunks in (lambda batch: [batch], by_unit):
        columns = annotator(reference, chunks, size)(step(keeps_groups), needs).batch.columns
        assert sorted(columns) == ["entropies", "old_logps", "ref_logps"]
        logps, entropies = plain(tiny_model())
        torch.testing.assert_close(columns["old_logps"], logps, atol=2e-6, rtol=0)
        torch.testing.assert_close(columns["entropies"], entropies, atol=2e-6, rtol=0)
        expected = plain(tiny_model(seed=1))[0]
        torch.testing.assert_close(columns["ref_logps"], expected, atol=2e-6, rtol=0)
        assert not columns["old_logps"].requires_grad


def test_nothing_is_computed_that_is_not_needed_or_known():
    scores = annotator()
    assert scores(step(), Needs()).batch.columns == {}
    known = torch.zeros(4, 3)
    result = scores(step(old_logps=known), Needs(old_logps=True))
    assert result.batch.columns["old_logps"] is known
    known = step(ref_answer_logps=torch.zeros(4))
    assert scores(known, Needs(ref_logps=True)).batch is known.batch


def test_a_missing_reference_is_an_error():
    with pytest.raises(ValueError, match="pass a reference"):
        annotator()(step(), Needs(ref_logps=True))


def test_a_missing_value_reader_is_an_error():
    with pytest.raises(ValueError, match="must override value_reader"):
        annotator()(step(), Needs(values=True))


def test_a_score_that_is_not_finite_is_named():
    scores = annotator()
    with torch.no_grad():
        scores.policy().lm_head.weight[10] = torch.nan
    scores(step(), Needs(old_logps=True))
    with pytest.raises(NonFiniteError, match="log-probability of the policy of row 0"):
        scores.guard.check(1)
