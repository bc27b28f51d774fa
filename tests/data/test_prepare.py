import gc
import pickle

import numpy as np
import pyarrow as pa
import pytest
from bpe import bpe_tokenizer
from datasets import Dataset, load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from trl.data.encode import TextEncoder
from trl.data.prepare import (
    CutReport,
    LazySupervisedDataset,
    SupervisedDataset,
    arrow_column,
    default_processes,
    fingerprint_of,
    items,
    prepare_supervised,
)
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


def trained(document):
    return document.ids[document.trained].tolist()


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
            SupervisedDataset(table, size, long_rows).checked(f"max_length={size}")
        return
    found = SupervisedDataset(table, size, long_rows)
    assert [(d.ids.tolist(), trained(d)) for d in map(found.__getitem__, range(len(found)))] == (
        expected
    )
    assert found.lengths.tolist() == [len(ids) for ids, _ in expected]
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
        SupervisedDataset(table_of([[1] * 3, [1] * 2, [1] * 4]), 2, "error")


def test_what_was_cut_is_said():
    masks = [[0, 0, 1], [1, 1, 1], [0, 0, 0], [0, 1, 1], [0, 0, 1], [0, 0, 1]]
    found = SupervisedDataset(table_of(masks), 2, "keep_start")
    assert found.report.lines("max_length=2 (long_rows='cut')") == [
        "6 of 6 rows longer than max_length=2 (long_rows='cut'): 14 tokens left out, 5 of them "
        "trained.",
        "4 of 6 rows left with nothing to train on: 0, 2, 4, ....",
    ]
    assert found.report.untrained == (0, 2, 4, 5)
    many = CutReport(9_000, tuple(range(1_200)), 5_000, 4_000, tuple(range(3_000)), 2_000)
    assert [line.split(" of 9,000")[0] for line in many.lines("x")] == ["1,200", "3,000", "2,000"]
    assert many.lines("x")[0].endswith("5,000 tokens left out, 4,000 of them trained.")


def test_prepared_columns_and_labels():
    rows = Dataset.from_dict({"prompt": ["ab", "a"], "completion": ["cd", "b"]})
    table = prepare_supervised(rows, ENCODER, SupervisedOptions())
    assert set(table.column_names) == {
        *("input_ids", "trained", "source"),
        "merged",
        "origin",
        "largest_id",
    }
    ids = ENCODER.ids(["abcd<eos>"])[0]
    document = SupervisedDataset(table)[0]
    assert document.ids.tolist() == ids and trained(document) == ids[2:]


def test_equal_results_for_any_number_of_processes(tmp_path):
    rows = Dataset.from_dict({"text": [f"row {i} of the harbour" for i in range(2_500)]})
    encoder = TextEncoder(bpe_tokenizer())
    one, two = (prepare_supervised(rows, encoder, SupervisedOptions(), n) for n in (1, 2))
    assert one[:] == two[:]
    assert one["source"][:] == list(range(2_500))


def test_equal_preparation_is_read_from_the_cache(tmp_path):
    Dataset.from_dict({"text": ["abc", "de"]}).save_to_disk(tmp_path / "rows")
    calls = tmp_path / "calls"

    def shout(row):
        calls.write_text(calls.read_text() + "." if calls.exists() else ".")
        return row["text"] * 2

    def prepare(encoder=ENCODER, **options):
        rows = Dataset.load_from_disk(tmp_path / "rows")
        chosen = SupervisedOptions(formatting_func=shout, **options)
        return prepare_supervised(rows, encoder, chosen)._fingerprint, len(calls.read_text())

    first, made = prepare()
    assert prepare() == (first, made)
    other, _ = prepare(encoder=TextEncoder(bpe_tokenizer()))
    assert len({first, other, prepare(completion_only_loss=False)[0]}) == 3


def test_streams_are_encoded_while_they_are_read():
    texts = ["ab", "cd"]
    stream = Dataset.from_dict({"text": texts}).to_iterable_dataset()
    rows = prepare_supervised(stream, ENCODER, SupervisedOptions())
    tables = rows.with_format("arrow").iter(1)
    found = [document for table in tables for document in SupervisedDataset(Dataset(table))]
    assert [d.ids.tolist() for d in found] == [ENCODER.ids([t + "<eos>"])[0] for t in texts]
    assert [d.source for d in found] == [0, 1]
    assert [d.trained.tolist() for d in found] == [[False, True, True]] * 2


def test_a_stream_of_token_ids_has_their_names_before_and_after():
    stream = Dataset.from_dict({"input_ids": [[7, 8, 9]]}).to_iterable_dataset()
    (row,) = prepare_supervised(stream, ENCODER, SupervisedOptions())
    assert row["input_ids"] == [7, 8, 9] and row["trained"] == [True] * 3


def test_selected_rows_keep_their_source():
    table = table_of([[1, 1], [1] * 3, [1] * 4]).select([2, 0])
    assert [d.source for d in map(SupervisedDataset(table).__getitem__, range(2))] == [2, 0]
    assert SupervisedDataset(table).lengths.tolist() == [4, 2]


def test_errors_name_the_rows():
    rows = Dataset.from_dict({"input_ids": [[1], [2, 3]], "labels": [[1], [2]]})
    with pytest.raises(ValueError, match="Row 1 of the dataset: labels must be as long as"):
        prepare_supervised(rows, ENCODER, SupervisedOptions())
    with pytest.raises(ValueError, match="The dataset has no rows"):
        prepare_supervised(rows.select([]), ENCODER, SupervisedOptions())


def test_nothing_looks_for_garbage_while_rows_are_encoded():
    seen = []

    def text(row):
        seen.append(gc.isenabled())
        return row["text"]

    options = SupervisedOptions(formatting_func=text)
    prepare_supervised(Dataset.from_dict({"text": ["ab", "cd"]}), ENCODER, options)
    assert seen == [False, False] and gc.isenabled()
    with pytest.raises(ValueError, match="Row 0 of the dataset"):
        prepare_supervised(Dataset.from_dict({"other": ["ab"]}), ENCODER, options)
    assert gc.isenabled()


class Drawing:
    """Makes texts of rows, with an object that nothing can copy or write down."""

    def __init__(self):
        self.drawn = (word for word in "ab")

    def text(self, row):
        return row["q"] + next(self.drawn)


def test_a_formatting_function_need_not_be_fit_for_a_cache():
    rows = Dataset.from_dict({"q": ["a", "b"]})
    options = SupervisedOptions(formatting_func=Drawing().text)
    found = prepare_supervised(rows, ENCODER, options)["input_ids"][:]
    assert found == ENCODER.ids(["aa<eos>", "bb<eos>"])


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_transform_of_the_dataset_makes_the_rows(is_lazy):
    rows = Dataset.from_dict({"raw": ["ab", "c"]})
    rows = rows.with_transform(lambda batch: {"text": [text * 2 for text in batch["raw"]]})
    if is_lazy:
        found = LazySupervisedDataset(rows, ENCODER, SupervisedOptions()).__getitems__([0, 1])
        ids = [document.ids.tolist() for document in found]
    else:
        ids = prepare_supervised(rows, ENCODER, SupervisedOptions())["input_ids"][:]
    assert ids == ENCODER.ids(["abab<eos>", "cc<eos>"])


def test_few_rows_start_no_processes():
    assert default_processes(2_000) is None


def test_a_column_may_have_more_items_than_an_array_holds():
    size = 3 << 29
    bits = pa.Array.from_buffers(pa.bool_(), size, [None, pa.py_buffer(np.zeros(size // 8, "u1"))])
    chunk = pa.ListArray.from_arrays(pa.array([0, size], pa.int32()), bits)
    table = pa.table({"trained": pa.chunked_array([chunk, chunk])})
    lists = arrow_column(Dataset(table, fingerprint="long"), "trained")
    assert items(lists).tolist() == [size, size]


def test_rows_of_a_column_are_those_that_were_selected():
    dataset = Dataset.from_dict({"ids": [[0], [1, 1], [2], [], [4]]})
    for rows in (dataset, dataset.select([3, 1, 0]), dataset.shuffle(seed=2), dataset.select([])):
        assert arrow_column(rows, "ids").to_pylist() == rows["ids"][:]
    assert dataset.select([3, 1, 0])._indices is not None, "which the rows are read by"


def test_a_fingerprint_tells_datasets_apart_and_stays():
    dataset = Dataset.from_dict({"ids": [1, 2, 3]})
    same = Dataset(dataset.data, fingerprint=fingerprint_of(dataset))
    assert fingerprint_of(same) == fingerprint_of(dataset)
    others = [dataset.select([1, 0]), dataset.rename_column("ids", "x"), dataset.map(lambda x: x)]
    assert len({fingerprint_of(dataset), *map(fingerprint_of, others)}) == 4


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
        found = SupervisedDataset(table_of(masks), size, "wrapped_across")
        assert [
            (d.ids.tolist(), trained(d)) for d in map(found.__getitem__, range(len(found)))
        ] == (expected)
        assert found.lengths.tolist() == [len(block) for block, _ in expected]


def test_lazy_documents_are_those_of_a_prepared_dataset(caplog):
    prompts = ["ab", "a" * 9, "c", "d"]
    rows = Dataset.from_dict({"prompt": prompts, "completion": list("wxyz")})
    options = SupervisedOptions()
    table = prepare_supervised(rows, ENCODER, options)
    prepared, lazy = (
        SupervisedDataset(table, 5),
        LazySupervisedDataset(rows, ENCODER, options, max_length=5),
    )
    expected = [(d.source, d.ids.tolist(), trained(d)) for d in map(prepared.__getitem__, range(3))]
    found = [(d.source, d.ids.tolist(), trained(d)) for d in lazy.__getitems__([0, 1, 2, 3])]
    assert found == expected and [source for source, *_ in found] == [0, 2, 3]
    assert [text.split("; further")[0] for text in caplog.messages[-2:]] == [
        "Row 1 is over a length limit",
        "Row 1 is left out, with nothing left to train on",
    ]
    # A micro-batch always has a document; this one is not trained on.
    assert [d.counts for d in lazy.__getitems__([1])] == [False] and len(lazy) == 4


def test_workers_that_are_not_forked_read_tokens_from_the_disk(tmp_path):
    """What a loader sends to such a worker does not grow with the tokens."""
    rows = Dataset.from_dict({"text": ["some words " * 400] * 200})
    prepare_supervised(rows, ENCODER, SupervisedOptions()).save_to_disk(tmp_path)
    found = SupervisedDataset(load_from_disk(tmp_path), max_length=900)
    sent = pickle.dumps(found)
    assert len(sent) < 20_000 < 4 * found.lengths.sum()
    assert (pickle.loads(sent)[7].ids == found[7].ids).all()
