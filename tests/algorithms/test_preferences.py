"""Log-ratios of answers, and metrics for both sides."""

from dataclasses import dataclass

import pytest
import torch
from batches import logged, make_batches, make_group, token_values

from trl.algorithms.preferences import PreferenceAlgorithm
from trl.online.metrics import MetricStore
from trl.types import TokenScores


@dataclass(frozen=True)
class Compared(PreferenceAlgorithm):
    beta: float = 0.5
    has_reference: bool = True


GROUPS = [make_group([3, 1]), make_group([2, 4], row=1)]


def test_log_ratios_to_token_and_answer_log_probabilities_of_the_reference():
    (batch,) = make_batches(GROUPS)
    logps, reference = token_values(batch), token_values(batch, 1)
    wanted = [float(logps[row].sum() - reference[row].sum()) for row in range(4)]
    by_token = batch.with_columns(ref_logps=reference)
    by_answer = batch.with_columns(ref_answer_logps=reference.sum(1))
    for known in (by_token, by_answer):
        found = Compared().log_ratios(TokenScores(logps), known)
        assert found.tolist() == pytest.approx(wanted)
    free = Compared(has_reference=False).log_ratios(TokenScores(logps), batch)
    assert free.tolist() == pytest.approx(logps.sum(1).tolist())


def test_a_reference_that_was_not_computed_is_named():
    (batch,) = make_batches(GROUPS)
    with pytest.raises(KeyError, match="ref_logps"):
        Compared().log_ratios(TokenScores(token_values(batch)), batch)


def test_predictions_are_implied_rewards_and_log_probabilities():
    (batch,) = make_batches(GROUPS)
    logps = token_values(batch)
    batch = batch.with_columns(ref_answer_logps=torch.tensor([-1.0, -2.0, -3.0, -4.0]))
    found = Compared().predictions(TokenScores(logps), batch)
    assert found["logps"].shape == (2, 2)
    assert float(found["rewards"][1, 0]) == pytest.approx(0.5 * float(logps[2].sum() + 3))


def test_metrics_of_a_side_are_means_over_its_answers():
    (batch,) = make_batches(GROUPS)
    logps, logits = token_values(batch), token_values(batch, 3)
    sides = {"chosen": torch.tensor([True, False, False, True]), "rejected": torch.zeros(4) > 0}
    ratios, metrics = torch.tensor([1.0, 2.0, 3.0, 4.0]), MetricStore()
    scores = TokenScores(logps, mean_logit=logits)
    Compared().record_sides(scores, ratios, sides, batch, metrics)
    found = logged(metrics)
    assert found["rewards/chosen"] == 0.5 * (1 + 4) / 2
    assert found["logps/chosen"] == pytest.approx(float(logps[0].sum() + logps[3].sum()) / 2)
    assert found["logits/chosen"] == pytest.approx(float(logits[0].sum() + logits[3].sum()) / 7)
    assert found["rewards/rejected"] is None  # of no answer
