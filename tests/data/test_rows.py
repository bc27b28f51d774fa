import torch
from datasets import Dataset
from tiny import tiny_tokenizer

from trl.data.encode import TextEncoder
from trl.data.preference_cutting import PreferenceLimits, cut_preferences
from trl.data.preference_rows import prepare_preferences
from trl.data.rows import AnswerGroup, AnswerRows, SupervisedRows

ENCODER = TextEncoder(tiny_tokenizer())
PAIRS = [
    {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5, 6], "rejected_ids": [7], "margin": 0.5},
    {"prompt_ids": [8], "chosen_ids": [9, 10], "rejected_ids": [11, 12]},
]


def dataset(rows, **limits):
    table = prepare_preferences(Dataset.from_list(rows), ENCODER)
    return cut_preferences(table, PreferenceLimits(**limits)).dataset


def document(trained, source=0):
    ids = list(range(10, 10 + len(trained)))
    labels = [i if flag else -100 for i, flag in zip(ids, trained, strict=True)]
    return {"input_ids": ids, "labels": labels, "source": source, "merged": 0, "origin": ""}


def test_rows_hold_what_is_trained_and_what_stands_before():
    rows = SupervisedRows.of([document([0, 0, 1, 0, 1, 0], 4), document([0, 1, 1], 9)])
    assert rows.flat.prompt_ids == [[10, 11], [10]]
    assert rows.flat.completion_ids == [[12, 13, 14], [11, 12]]
    assert rows.loss_mask.tolist() == [[True, False, True], [True, True, False]]
    assert rows.flat.row_ids == [4, 9] and rows.loss_mask.sum() == 4 and len(rows) == 2


def test_select_cuts_to_the_longest_completion():
    rows = SupervisedRows.of([document([0, 1, 1, 1]), document([0, 1], 5)]).select([1])
    assert rows.loss_mask.tolist() == [[True]] and rows.flat.row_ids == [5]
    assert torch.is_tensor(rows.loss_mask) and rows.flat.completion_ids == [[11]]


def test_documents_that_only_keep_a_rank_busy_count_nothing():
    documents = document([0, 1, 1]), document([0, 1], 3)
    rows = SupervisedRows.of([one | {"is_filler": True} for one in documents])
    assert rows.loss_mask.sum() == 0 and rows.tokens() == 0 and rows.flat.lengths == [3, 2]
    assert SupervisedRows.of([document([0, 1, 1])]).tokens() == 3


def test_rows_are_cut_by_prompts_and_flat_for_a_scorer():
    items = dataset(PAIRS)
    rows = AnswerRows.of([items[0], items[1] | {"is_filler": True}])
    assert len(rows) == 2 and len(rows.flat) == 4
    assert rows.flat.prompt_ids == [[1, 2, 3], [1, 2, 3], [8], [8]]
    assert rows.flat.completion_ids == [[4, 5, 6], [7], [9, 10], [11, 12]]
    assert rows.flat.row_ids == [0, 0, 1, 1] and rows.flat.lengths == [6, 4, 3, 3]
    assert rows.values["lengths"].tolist() == [[3, 1], [2, 2]]
    assert rows.values["counts"].tolist() == [True, False] and rows.tokens() == 7
    assert rows.token_mask().sum(1).tolist() == [3, 1, 0, 0]
    rows = rows.of_step(torch.tensor([5]), 3, "eval").with_values(x=torch.tensor([[1.0], [2.0]]))
    part = rows.select(range(1, 2))
    assert (len(part), part.share_of_micro_batch, part.mode, part.num_micro_batches) == (
        1,
        0.5,
        "eval",
        3,
    )
    assert part.flat.completion_ids == [[9, 10], [11, 12]] and part.values["x"].tolist() == [[2.0]]
    assert part.to(torch.device("cpu")).totals.tolist() == [5]


def test_nothing_predicts_the_first_token_behind_an_empty_prompt():
    rows = AnswerRows.of([AnswerGroup([], [[4, 5, 6], [7]], 0), AnswerGroup([8], [[9], [10]], 1)])
    assert rows.values["lengths"].tolist() == [[2, 0], [1, 1]]


def test_answers_of_different_numbers_are_brought_to_their_prompts():
    rows = {"prompt_ids": [1], "answers_ids": [[2], [3], [4]], "ranks": [2, 0, 1]}
    fewer = {"prompt_ids": [1], "answers_ids": [[5, 6]], "ranks": [3]}
    items = dataset([rows, fewer])
    batch = AnswerRows.of([items[0], items[1]])
    assert batch.by_group(torch.arange(1, 5)).tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch.by_group(torch.ones(4, 2)).shape == (2, 3, 2)
    assert batch.values["ranks"].tolist() == [[2, 0, 1], [3, 0, 0]]
    assert batch.values["lengths"].tolist() == [[1, 1, 1], [2, 0, 0]]


def test_a_part_of_a_micro_batch_keeps_its_number_of_answers():
    """Its values by group stay as wide as what is known of the groups."""
    groups = [AnswerGroup([1], [[2], [3], [4]], 0), AnswerGroup([1], [[5], [6]], 1)]
    part = AnswerRows.of(groups).select([1])
    assert part.by_group(torch.tensor([0.5, 0.25])).tolist() == [[0.5, 0.25, 0.0]]
    states = part.by_group(torch.ones(2, 4))
    assert states.shape == (1, 3, 4) and states[0, 2].tolist() == [0.0] * 4
    assert part.values["lengths"].tolist() == [[1, 1, 0]]
