import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from trl.batch import Batch
from trl.data.encode import TextEncoder
from trl.data.examples import (
    RowReader,
    batch_columns,
    format_document,
    make_group,
    num_tokens,
    to_examples,
    token_counts,
)
from trl.data.preference_rows import prepare_preferences

ENCODER = TextEncoder(tiny_tokenizer())
PAIRS = [
    {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5, 6], "rejected_ids": [7], "margin": 0.5},
    {"prompt_ids": [8], "chosen_ids": [9, 10], "rejected_ids": [11, 12]},
]
RANKED = [
    {"prompt_ids": [1], "answers_ids": [[2], [3], [4]], "ranks": [2, 0, 1]},
    {"prompt_ids": [1], "answers_ids": [[5, 6]], "ranks": [3]},
]
LABELLED = [
    {"prompt_ids": [1], "completion_ids": [2], "label": False},
    {"prompt_ids": [3], "completion_ids": [4, 5], "label": True},
]


def prepared(rows):
    return prepare_preferences(Dataset.from_list(rows), ENCODER)


def document(in_loss, source=0):
    ids = list(range(10, 10 + len(in_loss)))
    labels = [i if flag else -100 for i, flag in zip(ids, in_loss, strict=True)]
    return {"input_ids": ids, "labels": labels, "source": source, "merged": 0, "origin": "x"}


def ids_of(group):
    return list(group.prefix.ids), [list(branch.ids) for branch in group.branches]


@pytest.mark.parametrize(
    ("in_loss", "prefix", "ids", "mask"),
    [
        ([0, 0, 1, 0, 1, 0], [10, 11], [12, 13, 14], [True, False, True]),
        ([0, 1, 1], [10], [11, 12], [True, True]),
        ([1, 1], [10], [11], [True]),  # nothing predicts the first token
    ],
)
def test_a_document_is_divided_before_its_first_target(in_loss, prefix, ids, mask):
    group = make_group(document(in_loss, 4))
    assert ids_of(group) == (prefix, [ids]) and list(group.branches[0].loss_mask) == mask
    assert (group.row, group.origin, group.is_filler) == (4, "x", False)


@pytest.mark.parametrize("in_loss", [[0, 0], [1], [0]])
def test_a_document_without_a_target_is_a_filler(in_loss):
    group = make_group(document(in_loss))
    assert group.is_filler and Batch.of([group]).loss_mask.sum() == 0


def test_answers_are_branches():
    (pair,) = RowReader(prepared(PAIRS)).__getitems__([0])
    assert ids_of(make_group(pair)) == ([1, 2, 3], [[4, 5, 6], [7]])
    assert all(all(branch.loss_mask) for branch in make_group(pair).branches)
    ranked = prepared(RANKED)
    assert ids_of(make_group(ranked[0])) == ([1], [[2], [3], [4]])
    labelled = prepared(LABELLED)[1] | {"kl_completion_ids": [6, 7]}
    group = make_group(labelled)
    assert ids_of(group) == ([3], [[4, 5], [6, 7]]) and group.row == 1
    assert [any(branch.loss_mask) for branch in group.branches] == [True, False]


def test_rows_are_read_by_the_batch_and_fillers_marked():
    for dataset in (prepared(PAIRS), prepared(RANKED)):
        for rows in (dataset, dataset.select([1, 0]), dataset.with_format("torch")):
            reader = RowReader(rows)
            plain = list(rows.with_format(None))
            assert len(reader) == 2
            assert reader.__getitems__([1, 0]) == plain[::-1]
            assert reader.__getitems__([~1]) == [plain[1] | {"is_filler": True}]
            assert make_group(reader.__getitems__([~0])[0]).is_filler


def test_another_dataset_can_be_read():
    reader = RowReader(prepared(PAIRS))
    reader.read_from(prepared(LABELLED))
    assert reader.__getitems__([0])[0]["completion_ids"] == [2]


def test_columns_of_pairs_have_an_entry_for_each_answer():
    columns = batch_columns(list(prepared(PAIRS)))
    assert columns["rank"].tolist() == [0, 1, 0, 1]
    assert columns["margin"].tolist() == [0.5, 0.5, 0.0, 0.0]
    assert columns.keys() == {"rank", "margin"}
    known = [{"ref_chosen_logps": -1.0, "ref_rejected_logps": x} for x in (-2.0, -3.0)]
    examples = [row | logps for row, logps in zip(prepared(PAIRS), known, strict=True)]
    assert batch_columns(examples)["ref_answer_logps"].tolist() == [-1.0, -2.0, -1.0, -3.0]


def test_columns_of_ranked_and_labelled_answers():
    ranked = list(prepared(RANKED))
    columns = batch_columns(ranked)
    assert columns["rank"].tolist() == [2, 0, 1, 3]
    batch = Batch.of(list(map(make_group, ranked)), columns)
    assert batch.is_better.sum() == 3
    labelled = [row | {"kl_completion_ids": [6]} for row in prepared(LABELLED)]
    columns = batch_columns(labelled)
    assert columns["label"].tolist() == [False, False, True, True]
    assert columns["label"].dtype == torch.bool and columns.keys() == {"label"}
    logps = {"ref_completion_logps": -1.0, "ref_kl_completion_logps": -2.0}
    columns = batch_columns([row | logps for row in labelled])
    assert columns["ref_answer_logps"].tolist() == [-1.0, -2.0] * 2
    assert batch_columns([document([0, 1])]) == {}


def test_tokens_are_counted_without_reading_them():
    for rows in (PAIRS, RANKED, LABELLED):
        dataset = prepared(rows)
        assert token_counts(dataset).tolist() == list(map(num_tokens, dataset))
    documents = Dataset.from_list([document([1] * n) for n in (3, 5, 1)])
    assert token_counts(documents).tolist() == list(map(num_tokens, documents)) == [3, 5, 1]
    assert token_counts(documents.select([2, 0])).tolist() == [1, 3]


@given(st.lists(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=3), min_size=1))
def test_tables_become_examples(chunks):
    lists = pa.chunked_array(chunks, pa.list_(pa.int32()))
    table = pa.table({"ids": lists, "row": np.arange(len(lists))})
    assert to_examples(table) == table.to_pylist()
    assert to_examples(table[1:]) == table[1:].to_pylist()


def test_what_is_in_the_loss_is_marked():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("2+3=5")["input_ids"]
    row = {"input_ids": ids, "labels": [-100] * 4 + ids[4:], "source": 7}
    start = "row 7, 1 of 5 tokens trained (marked): 2+"
    assert format_document(row, tokenizer) == f"{start}3=\u27ea5\u27eb"
    assert format_document(row, tokenizer, max_tokens=2) == f"{start} ... and 3 tokens"
