"""Ranks that decide together whether prompts may be shared."""

import torch
from tiny import tiny_model

from trl.models.scorer import Scorer
from trl.types import Rows

PROMPT = [8, 9, 10]


def rollout(length: int) -> Rows:
    return Rows.of([(PROMPT, [20 + i % 30 for i in range(length)]), (PROMPT, [50, 51])])


def scorer() -> Scorer:
    return Scorer(pad_id=0, temperature=1.0, device=torch.device("cpu"))


def other_rank(*numbers):
    """What `largest` gives if another rank has these numbers, one for each exchange."""
    left = iter(numbers)
    return lambda mine: max(mine, next(left))


def shares(score, model, length) -> bool:
    return score.packs(model, rollout(length), [score.token_reader(model)])


def test_nothing_is_tried_after_ranks_agreed():
    model, score, calls = tiny_model(), scorer(), []
    score.agree(model, rollout(9), other_rank(0, 0.0))
    model.model.register_forward_hook(lambda *args: calls.append(1))
    assert shares(score, model, 9) and shares(score, model, 20)
    assert not shares(score, model, 40), "longer than twice what was tried"
    assert not calls and score.check.enabled


def test_the_longest_row_of_all_ranks_counts():
    model, score = tiny_model(), scorer()
    score.agree(model, rollout(9), other_rank(30, 0.0))
    assert shares(score, model, 50)
    exchanges = iter([12])  # one more would be an error: nothing is tried again
    score.agree(model, rollout(9), lambda mine: max(mine, next(exchanges)))


def test_a_check_that_fails_elsewhere_counts_here(log):
    model, score = tiny_model(), scorer()
    score.agree(model, rollout(9), other_rank(0, float("inf")))
    assert not score.check.enabled and not shares(score, model, 9)
    assert "failed the check on another rank" in log.text


def test_a_check_that_fails_here_is_told_to_the_others(log, monkeypatch):
    from trl.models import layout_check

    told = []
    monkeypatch.setattr(layout_check, "TOLERANCES", {torch.float32: -1.0})
    model, score = tiny_model(), scorer()
    score.agree(model, rollout(9), lambda mine: told.append(mine) or mine)
    assert len(told) == 2 and told[1] > 0.0
    assert "in a check" in log.text and not score.check.enabled


def test_ranks_that_do_not_share_exchange_nothing():
    score = Scorer(pad_id=0, temperature=1.0, device=torch.device("cpu"), shared_prefix=False)
    score.agree(tiny_model(), rollout(9), None)
