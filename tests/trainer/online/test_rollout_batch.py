"""What a rollout batch is made of, and which of its rows have a gradient."""

import pytest
import torch

from trl.distributed import Ranks
from trl.generation.base import Generations
from trl.trainer.online.rollout_batch import (
    completion_advantages,
    mark_truncated,
    rollout_batch,
    rows_with_gradient,
)
from trl.types import Prompts, RewardTable

ROWS = Prompts(messages=["a", "a", "b", "b"], token_ids=[[5], [5], [6, 7], [6, 7]])
GENERATIONS = Generations(
    completion_ids=[[10, 1], [11, 12, 13], [1], [14, 15, 1]],
    finish_reasons=["stop", "length", "stop", "stop"],
    sampling_logps=[[-1.0, -2.0], [-3.0] * 3, [-4.0], [-5.0] * 3],
    policy_mask=[[True, True], [True] * 3, [True], [False, False, False]],
)


def made(first_row=0, prompts=ROWS, **options):
    return rollout_batch(prompts, GENERATIONS, first_row, 2, **options)


def test_tokens_that_the_policy_wrote_are_trained_on():
    batch = made()
    assert batch.loss_mask.tolist() == [
        [True, True, False], [True, True, True], [True, False, False], [False] * 3
    ]  # fmt: skip
    assert batch.columns["sampling_logps"][0].tolist() == [-1.0, -2.0, 0.0]
    assert batch.group_sizes == [2, 2]
    assert batch.rows.prompt_ids == [[5], [5], [6, 7], [6, 7]]
    assert list(batch.rows.row_ids) == [0, 1, 2, 3]


def test_a_rank_may_begin_within_a_group():
    batch = made(first_row=5)
    assert batch.group_sizes == [1, 2, 1]
    assert list(batch.rows.row_ids) == [0, 1, 2, 3], "they are of the rank"
    assert batch.rows.prompt_ids == [[5], [5], [6, 7], [6, 7]]


def test_rows_of_a_group_may_have_read_different_things():
    """As environments decide; rows with equal prompts are still one prefix."""
    prompts = Prompts(messages=["a", "a", "b", "b"], token_ids=[[5], [5, 8], [6, 7], [6, 7]])
    batch = made(prompts=prompts)
    assert batch.group_sizes == [2, 2]
    assert batch.rows.prompt_ids == prompts.token_ids
    assert batch.select([1, 2]).rows.prompt_ids == [[5, 8], [6, 7]]
    assert batch.tokens_per_unit() == [1 + 2, 2 + 3, 2 + 1, 3]


def test_truncated_completions_are_left_out_if_asked_to():
    batch = made(masks_truncated=True)
    assert not batch.loss_mask[1].any() and batch.loss_mask.sum() == 3
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0])
    table = RewardTable(
        per_function=scores[:, None],
        weights=torch.ones(1),
        total=scores,
        names=("f",),
        group_size=2,
    )
    for masks in (False, True):
        found = mark_truncated(table, GENERATIONS.truncated(), masks, Ranks())
        assert found.total.isnan().tolist() == [False, masks, False, False]
        assert found.has_ended.tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [
        ([0.0, 1.0, -1.0, 1.0], [False, True, True, False]),
        ([0.0, torch.nan, 0.0, 0.0], [False, True, False, False]),
        # Of tokens: one beyond the end of its completion, and one that is no number.
        (
            [[0.0, 0.0, 1.0], [0.0, 0.0, torch.nan], [0.0] * 3, [0.0] * 3],
            [False, True] + [False] * 2,
        ),
    ],
)
def test_rows_with_gradient(advantages, expected):
    batch = made().with_columns(advantages=torch.tensor(advantages))
    assert rows_with_gradient(batch).tolist() == expected


def test_reported_advantages_are_those_of_completions():
    """Of tokens, the mean; of scaled ones, what they were before."""
    of_rows = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert completion_advantages(made().with_columns(advantages=of_rows), Ranks()).equal(of_rows)
    of_tokens = torch.tensor([[1.0, 3.0, 9.0], [1.0, 1.0, 4.0], [5.0, 9.0, 9.0], [1.0] * 3])
    batch = made().with_columns(advantages=of_tokens)
    assert completion_advantages(batch, Ranks()).tolist() == [2.0, 2.0, 5.0, 0.0]
    values = torch.full((4, 3), 7.0)
    batch = batch.with_columns(advantages=of_tokens / 9, values=values, returns=of_tokens + values)
    assert completion_advantages(batch, Ranks()).tolist() == [2.0, 2.0, 5.0, 0.0]
