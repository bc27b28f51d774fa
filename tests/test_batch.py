"""Batches: cutting, grouping and totals."""

import pytest
import torch

from trl.batch import Batch, Branch, Columns, Group, Step, with_totals
from trl.distributed import Ranks
from trl.types import Prefix


def make_group(prefix, *branches, **options):
    tokens = tuple(Branch(ids, [True] * len(ids)) for ids in branches)
    return Group(Prefix(prefix), tokens, **{"row": 0} | options)


@pytest.fixture
def batch():
    groups = [
        make_group([1, 2], [3], [4, 5, 6], row=7),
        make_group([8], [9, 9], row=8),
        make_group([], [5, 6], [7], row=9),
    ]
    columns = Columns(
        rewards=torch.arange(5.0),
        old_logps=torch.arange(15.0).view(5, 3),
        rank=torch.tensor([1, 0, 0, 0, 1]),
    )
    return Batch.of(groups, columns)


def test_the_first_token_of_a_row_without_prefix_is_not_in_the_loss(batch):
    assert batch.loss_mask.int().tolist() == [
        [1, 0, 0],
        [1, 1, 1],
        [1, 1, 0],
        [0, 1, 0],
        [0, 0, 0],
    ]
    assert batch.lengths.tolist() == [1, 3, 2, 1, 0]


def test_rows_stand_in_the_order_of_groups(batch):
    assert [list(ids) for ids in batch.rows.completion_ids] == [[3], [4, 5, 6], [9, 9], [5, 6], [7]]
    assert list(batch.rows.row_ids) == [7, 7, 8, 9, 9]
    assert batch.rows.prefixes[0] is batch.rows.prefixes[1]


def test_selected_rows_keep_their_groups_and_columns(batch):
    part = batch.select([0, 2, 4])
    assert part.group_sizes == [1, 1, 1]
    assert part.columns["rewards"].tolist() == [0.0, 2.0, 4.0]
    assert part.columns["old_logps"].tolist() == [[0.0, 1.0], [6.0, 7.0], [12.0, 13.0]]
    assert part.loss_mask.shape == (3, 2)


@pytest.mark.parametrize("rows", [[2, 0], [1, 1]])
def test_selected_rows_must_be_ascending(batch, rows):
    with pytest.raises(ValueError, match="must be ascending"):
        batch.select(rows)


def test_chunks_never_divide_groups_that_are_kept(batch):
    assert batch.tokens_per_unit() == [3, 3, 3, 2, 1]
    whole = Batch.of(batch.groups, batch.columns, keeps_groups=True)
    assert whole.tokens_per_unit() == [6, 3, 3]
    assert whole.select_units(range(1, 3)).group_sizes == [1, 2]
    assert whole.select_units(range(3)) is whole


def test_values_by_group(batch):
    assert batch.by_group(batch.columns["rewards"]).tolist() == [[0, 1], [2, 0], [3, 4]]
    assert batch.exists.tolist() == [[True, True], [True, False], [True, True]]
    assert batch.select_branch(0).columns["rewards"].tolist() == [0.0, 2.0, 3.0]
    assert batch.by_row(torch.tensor([0.5, 1.5, 2.5])).tolist() == [0.5, 0.5, 1.5, 2.5, 2.5]


def test_the_branch_of_lower_rank_is_better(batch):
    better = [[group, i, j] for group, i, j in batch.is_better.nonzero().tolist()]
    assert better == [[0, 1, 0], [2, 0, 1]]


def test_fillers_count_in_no_total():
    real = make_group([1], [2, 3], [4])
    filler = make_group([1], [2, 3], [4], is_filler=True)
    (batch,) = with_totals([Batch.of([real, filler])], Ranks())
    totals = batch.totals
    assert (totals.tokens, totals.rows, totals.groups, totals.first_tokens) == (3, 2, 1, 2)
    assert totals.all_rows == totals.all_units == 4
    (batch,) = with_totals([Batch.of([real, filler], keeps_groups=True)], Ranks())
    assert batch.totals.all_units == 2
    assert batch.exists.tolist() == [[True, True], [False, False]]
    assert batch.row_mask.tolist() == [True, True, False, False]


def test_nothing_predicts_the_first_token_behind_an_empty_prefix():
    batch = Batch.of([make_group([], [4, 5, 6], [7]), make_group([8], [9], [10])])
    assert batch.lengths.tolist() == [2, 0, 1, 1]
    assert batch.loss_mask.sum(1).tolist() == [2, 0, 1, 1]


def test_tokens_of_fillers_and_of_shared_prefixes_do_not_count_again():
    real = make_group([1, 2, 3], [4, 5, 6], [7])
    filler = make_group([8], [9, 10], is_filler=True)
    batch = Batch.of([real, filler])
    assert batch.num_tokens == 3 + 3 + 1 and batch.tokens_per_unit() == [6, 1, 3]


def test_rows_of_one_branch_of_each_group():
    batch = Batch.of([make_group([1], [2, 3], [4]), make_group([5], [6], is_filler=True)])
    assert batch.branch_mask(0).tolist() == [True, False, False]
    assert batch.branch_mask(1).tolist() == [False, True, False]


def test_a_batch_in_no_step_has_no_totals(batch):
    with pytest.raises(ValueError, match="in no optimizer step: call `with_totals`"):
        batch.totals  # noqa: B018


def test_chunks_keep_the_totals_of_their_step(batch):
    """A total that is counted anew for a chunk makes updates as many times too large."""
    first, second = with_totals([batch, batch.select([0])], Ranks())
    assert first.totals.tokens == second.totals.tokens == 7 + 1
    assert first.totals.pairs == 2
    assert first.select([2]).totals is first.totals
    assert first.totals.micro_batch_tokens == 2 * 7
    assert second.totals.micro_batch_tokens == 2 * 1


def test_half_the_totals_for_one_of_two_steps(batch):
    (batch,) = with_totals([batch], Ranks())
    assert batch.totals.scaled(0.5).tokens == 3.5


def test_a_step_gives_this_ranks_rows_their_advantages(batch):
    step = Step(batches=[batch], ranks=Ranks()).with_advantages(torch.arange(5.0))
    assert step.batch.columns["advantages"].tolist() == [0, 1, 2, 3, 4]


def test_a_batch_that_cannot_be_cut_evenly(batch):
    with pytest.raises(ValueError, match="5 rows cannot be cut into 2 batches"):
        batch.split(2)
    assert [len(part) for part in batch.split(5)] == [1] * 5
