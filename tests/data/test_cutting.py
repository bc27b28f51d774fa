import pickle

import pytest
from datasets import Dataset, load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from trl.data.cutting import CutCounter, CutReport, DocumentLimits, cut_documents
from trl.data.encode import TextEncoder
from trl.data.examples import RowReader, token_counts
from trl.data.prepare import prepare_supervised
from trl.data.supervised import SupervisedOptions

ENCODER = TextEncoder(tiny_tokenizer())
rows_with_masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=20), min_size=1, max_size=8)


def table_of(masks):
    """Prepared rows with the given masks; row r has the ids 100 r, 100 r + 1, ..."""
    rows = {
        "input_ids": [[100 * r + t for t in range(len(mask))] for r, mask in enumerate(masks)],
        "labels": [
            [100 * r + t if kept else -100 for t, kept in enumerate(mask)]
            for r, mask in enumerate(masks)
        ],
    }
    return prepare_supervised(Dataset.from_dict(rows), ENCODER, SupervisedOptions())


def cut(table, max_length=None, long_rows="cut"):
    return cut_documents(table, DocumentLimits(max_length=max_length, long_rows=long_rows))


def in_loss(row):
    """The ids of a document that are in the loss, in which the first one never is."""
    return [label for label in row["labels"][1:] if label != -100]


@settings(deadline=None, max_examples=40)
@given(rows_with_masks, st.integers(1, 12), st.sampled_from(["cut", "keep_end", "drop", "split"]))
def test_cutting_agrees_with_cutting_by_hand(masks, size, long_rows):
    expected = []
    for r, mask in enumerate(masks):
        starts = {"keep_end": [max(0, len(mask) - size)], "split": range(0, len(mask), size)}
        for start in starts.get(long_rows, [0]):
            stop = min(start + size, len(mask))
            ids = [100 * r + t for t in range(start, stop)]
            kept = [100 * r + t for t in range(start + 1, stop) if mask[t]]
            if kept and not (long_rows == "drop" and len(mask) > size):
                expected.append((ids, kept))
    table = table_of(masks)
    if not expected:
        is_cut = any(len(mask) > size for mask in masks)
        blamed = f"with max_length={size}. Raise the limit" if is_cut else "on. Check the masks"
        with pytest.raises(ValueError, match=f"None of the {len(masks)} rows .*{blamed}"):
            cut(table, size, long_rows).checked(f"max_length={size}")
        return
    found = cut(table, size, long_rows)
    read = RowReader(found.dataset).__getitems__([*range(len(found))])
    for rows in (found.dataset, found.examples(), read):
        assert [(row["input_ids"], in_loss(row)) for row in rows] == expected
    assert found.lengths.tolist() == [len(ids) for ids, _ in expected]
    assert token_counts(found.dataset).tolist() == found.lengths.tolist()
    assert found.report.long == tuple(r for r, mask in enumerate(masks) if len(mask) > size)
    assert found.report.tokens_lost == sum(map(len, masks)) - sum(len(i) for i, _ in expected)
    assert found.report.trained_lost == sum(sum(m[1:]) for m in masks) - sum(
        len(kept) for _, kept in expected
    )
    empty = [r for r, m in enumerate(masks) if all(ids[0] // 100 != r for ids, _ in expected)]
    dropped = [r for r in empty if long_rows == "drop" and len(masks[r]) > size]
    assert found.report.untrained == tuple(r for r in empty if r not in dropped)


def test_a_long_row_is_an_error_if_asked_for():
    with pytest.raises(
        ValueError, match=r"2 of 3 rows have more than max_length=2 tokens, among them row 0, 2"
    ):
        cut(table_of([[1] * 3, [1] * 2, [1] * 4]), 2, "error")


def test_what_was_cut_is_said():
    masks = [[0, 0, 1], [1, 1, 1], [0, 0, 0], [0, 1, 1], [0, 0, 1], [0, 0, 1]]
    found = cut(table_of(masks), 2, "keep_start")
    assert found.report.lines("max_length=2 (long_rows='cut')") == [
        "6 of 6 rows longer than max_length=2 (long_rows='cut'): 14 tokens left out, 5 of them "
        "trained.",
        "4 of 6 rows left with nothing to train on: 0, 2, 4, ....",
    ]
    assert found.report.untrained == (0, 2, 4, 5)
    many = CutReport(9_000, tuple(range(1_200)), 5_000, 4_000, tuple(range(3_000)), 2_000)
    assert [line.split(" of 9,000")[0] for line in many.lines("x")] == ["1,200", "3,000", "2,000"]
    assert many.lines("x")[0].endswith("5,000 tokens left out, 4,000 of them trained.")


def test_selected_rows_keep_their_source():
    table = table_of([[1, 1], [1] * 3, [1] * 4]).select([2, 0])
    for size, lengths in ((None, [4, 2]), (3, [3, 2])):
        found = cut(table, size)
        assert found.dataset["source"][:] == [2, 0] and found.lengths.tolist() == lengths
        assert list(found.dataset) == found.examples()
        assert token_counts(found.dataset).tolist() == lengths


@settings(deadline=None, max_examples=40)
@given(rows_with_masks, st.integers(2, 12))
def test_blocks_of_several_documents_are_one(masks, size):
    ids = [100 * r + t for r, mask in enumerate(masks) for t in range(len(mask))]
    flat = [kept for mask in masks for kept in mask]
    blocks = [slice(start, start + size) for start in range(0, len(ids), size)]
    expected = [
        (ids[b], [i for i, kept in list(zip(ids[b], flat[b], strict=True))[1:] if kept])
        for b in blocks
    ]
    expected = [(block, kept) for block, kept in expected if kept]
    if expected:
        found = cut(table_of(masks), size, "wrapped_across")
        assert [(row["input_ids"], in_loss(row)) for row in found.dataset] == expected
        assert found.lengths.tolist() == [len(block) for block, _ in expected]


def test_workers_that_are_not_forked_read_tokens_from_the_disk(tmp_path):
    """What a loader sends to such a worker does not grow with the tokens."""
    rows = Dataset.from_dict({"text": ["some words " * 400] * 200})
    prepare_supervised(rows, ENCODER, SupervisedOptions()).save_to_disk(tmp_path)
    found = cut(load_from_disk(tmp_path), 900).dataset
    sent = pickle.dumps(RowReader(found))
    assert len(sent) < 20_000 < 4 * token_counts(found).sum()
    assert pickle.loads(sent).__getitems__([7, 3]) == RowReader(found).__getitems__([7, 3])
    assert pickle.loads(pickle.dumps(found))[7] == found[7]


def test_a_cut_dataset_is_one_of_datasets(tmp_path):
    found = cut(table_of([[1] * 5, [0, 0, 0, 1], [1] * 3, [1] * 9]), 3).dataset
    assert found.column_names == ["input_ids", "labels", "source", "merged", "origin"]
    assert found[0]["input_ids"] == [0, 1, 2] and found[:2]["source"] == [0, 2]
    assert found[-1]["labels"] == [300, 301, 302] and len(found) == 3
    assert found.select([2, 0])["source"][:] == [3, 0]
    assert found.shuffle(seed=0).sort("source")[:] == found[:]
    assert found.filter(lambda row: row["source"] > 1)["source"][:] == [2, 3]
    assert found.map(lambda row: {"n": len(row["input_ids"])})["n"][:] == [3, 3, 3]
    found.save_to_disk(tmp_path)
    assert load_from_disk(tmp_path)[:] == found[:]


def test_equal_cuts_have_equal_fingerprints():
    """So that `map` finds in its cache what it has made of them."""
    table = table_of([[1] * 5, [1] * 3])
    names = [cut(table, size).dataset._fingerprint for size in (3, 3, 2)]
    assert names[0] == names[1] != names[2]


def test_losses_of_a_stream_are_counted(caplog):
    losses = CutCounter()
    for masks in ([[1] * 5, [0, 0]], [[1] * 4], [[1] * 2]):
        losses.add(cut(table_of(masks), 3).report)
    losses.log_totals()
    assert caplog.messages == [
        "Row 0 is over a length limit; further ones are only counted.",
        "Row 1 is left out, with nothing left to train on; further ones are only counted.",
        "Rows of the stream: 2 over a length limit; 1 left out, with nothing left to train on.",
    ]
