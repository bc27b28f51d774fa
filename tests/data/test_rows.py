import numpy as np
import torch
from tiny import tiny_tokenizer

from trl.data.rows import Document, SupervisedRows, shown


def document(trained, source=0):
    ids = np.arange(10, 10 + len(trained), dtype=np.int32)
    return Document(ids=ids, trained=np.array(trained, dtype=bool), source=source)


def test_rows_hold_what_is_trained_and_what_stands_before():
    rows = SupervisedRows.of([document([0, 0, 1, 0, 1, 0], 4), document([0, 1, 1], 9)])
    assert rows.prompt_ids == [[10, 11], [10]]
    assert rows.completion_ids == [[12, 13, 14], [11, 12]]
    assert rows.loss_mask.tolist() == [[True, False, True], [True, True, False]]
    assert rows.row_ids == [4, 9] and rows.weight() == 4 and len(rows) == 2


def test_select_cuts_to_the_longest_completion():
    rows = SupervisedRows.of([document([0, 1, 1, 1]), document([0, 1], 5)]).select([1])
    assert rows.loss_mask.tolist() == [[True]] and rows.row_ids == [5]
    assert torch.is_tensor(rows.loss_mask) and rows.completion_ids == [[11]]


def test_documents_that_only_keep_a_rank_busy_count_nothing():
    rows = SupervisedRows.of([document([0, 1, 1]).uncounted(), Document.filler(3)])
    assert rows.weight() == 0 and rows.tokens() == 0 and rows.lengths == [3, 2]
    assert SupervisedRows.of([document([0, 1, 1])]).tokens() == 3


def test_what_is_trained_is_marked():
    tokenizer = tiny_tokenizer()
    ids = np.array(tokenizer("2+3=5")["input_ids"])
    mask = np.array([False] * 4 + [True])
    found = shown(Document(ids=ids, trained=mask, source=7), tokenizer)
    assert found == "row 7, 1 of 5 tokens trained (marked): 2+3=\u27ea5\u27eb"
    short = shown(Document(ids=ids, trained=mask, source=7), tokenizer, tokens=2)
    assert short == "row 7, 1 of 5 tokens trained (marked): 2+ ... and 3 tokens"
