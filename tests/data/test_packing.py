import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from trl.data.packing import (
    MicroBatchSampler,
    pack_dataset,
    pieces,
    remove_none_values,
    share_of_rank,
    truncate_dataset,
)

ROWS = {"input_ids": [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11], []]}
lengths = st.lists(st.integers(2, 20), min_size=1, max_size=60)


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 12))
def test_rows_end_to_end_are_cut_into_pieces(lengths, size):
    """Every token is in one piece, and pieces end where they must."""
    every, total = np.cumsum(lengths).tolist(), sum(lengths)
    begins = [stop - length for stop, length in zip(every, lengths, strict=True)]
    marks = {
        "split": {t for a, b in zip(begins, every, strict=True) for t in range(a, b, size)},
        "wrapped": {*range(0, total, size)},
        "wrapped_across": {*range(0, total, size)},
    }
    for how, inner in marks.items():
        start, stop = pieces(lengths, size, how)
        ends = {total} if how == "wrapped_across" else set(every)
        assert stop.tolist() == sorted((inner | ends) - {0})
        assert start.tolist() == [0, *stop[:-1].tolist()][: len(stop)]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("cut", [(0, 3), (5, 7)]),
        ("keep_end", [(2, 5), (5, 7)]),
        ("drop", [(0, 0), (5, 7)]),
    ],
)
def test_one_piece_of_each_row(how, expected):
    assert np.stack(pieces([5, 2], 3, how), 1).tolist() == [list(pair) for pair in expected]
    assert np.stack(pieces([5, 2], None, how), 1).tolist() == [[0, 5], [5, 7]]


@pytest.mark.parametrize(
    ("strategy", "ids", "lengths"),
    [
        ("bfd", [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7]], [[4], [3, 1], [2]]),
        ("bfd_split", [[1, 2, 3, 4], [8, 9, 10, 5], [6, 7, 11]], [[4], [3, 1], [2, 1]]),
        ("wrapped", [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]], None),
    ],
)
def test_pack_dataset(strategy, ids, lengths):
    packed = pack_dataset(Dataset.from_dict(ROWS), 4, strategy)
    assert packed["input_ids"][:] == ids
    assert ("seq_lengths" in packed.column_names) == (lengths is not None)
    if lengths:
        assert packed["seq_lengths"][:] == lengths


@pytest.mark.parametrize("size", [3, 7, 100, 1000])
def test_rows_are_packed_over_batches_of_the_dataset_with_any_length(size):
    rows = Dataset.from_dict({"input_ids": [[i] * (1 + i % size) for i in range(2_500)]})
    packed = pack_dataset(rows, size)
    found = sorted(token for ids in packed["input_ids"] for token in set(ids))
    assert found == list(range(2_500))
    assert sum(1 + i % size for i in range(2_500)) / (size * len(packed)) >= 0.98


def test_pack_dataset_keeps_columns_together_and_the_format():
    rows = Dataset.from_dict({"input_ids": [[1, 2], [3]], "labels": [[4, 5], [6]]})
    packed = pack_dataset(rows.with_format("torch"), 3)
    assert packed.format["type"] == "torch"
    assert packed["labels"][0].tolist() == [4, 5, 6]


def test_streams_are_packed_by_the_batch():
    rows = Dataset.from_dict(ROWS).to_iterable_dataset()
    assert [row["input_ids"] for row in pack_dataset(rows, 4, "bfd")] == [
        [1, 2, 3, 4],
        [8, 9, 10, 11],
        [6, 7],
    ]


@pytest.mark.parametrize(
    ("columns", "strategy", "error", "message"),
    [
        ({"a": [[1]]}, "worst", ValueError, "strategy='worst' must be one of"),
        ({"a": [1]}, "bfd", TypeError, "Column 'a' must consist of lists"),
        ({"a": [[1], [2, 3]], "b": [[1], [2]]}, "bfd", ValueError, "Row 1: column 'b' has 1 item"),
    ],
)
def test_what_cannot_be_packed_is_refused(columns, strategy, error, message):
    with pytest.raises(error, match=message):
        pack_dataset(Dataset.from_dict(columns), 4, strategy)


def test_truncate_dataset():
    rows = Dataset.from_dict(ROWS | {"name": list("abcde")})
    assert truncate_dataset(rows, 2)[:] == {
        "input_ids": [[1, 2], [6, 7], [8, 9], [11], []],
        "name": list("abcde"),
    }


def test_micro_batches_follow_from_seed_and_epoch():
    lengths = np.random.default_rng(0).integers(1, 40, 200)
    sampler, other = (MicroBatchSampler(lengths, 3, pack_size=64, seed=5) for _ in range(2))
    assert list(sampler) == list(other) and len(sampler) == len(list(sampler))
    sampler.set_epoch(1)
    assert list(sampler) != list(other)
    for batches in (list(sampler), list(other)):
        assert sorted(d for batch in batches for d in batch) == list(range(200))
        assert all(lengths[batch].sum() <= 3 * 64 for batch in batches)


def test_what_is_left_over_goes_to_the_first_ranks():
    batches = [[0, 1], [2, 3], [4, 5], [6]]
    shares = [list(share_of_rank(batches, rank, 3)) for rank in range(3)]
    assert shares == [[[0, 1], [6]], [[2, 3], [~6]], [[4, 5], [~6]]]


@settings(deadline=None, max_examples=60)
@given(lengths, st.integers(1, 4), st.integers(1, 3), st.sampled_from([None, 24]), st.booleans())
def test_every_document_is_trained_on_by_one_rank(sizes, rows, ranks, most, packs):
    pack_size = 20 if packs else None
    for epoch in range(2):
        seen, counts = [], set()
        for rank in range(ranks):
            order = MicroBatchSampler(sizes, rows, most, pack_size, 3, (rank, ranks))
            order.set_epoch(epoch)
            batches = list(order)
            counts.add(len(batches))
            assert len(batches) == len(order)
            seen += [i for batch in batches for i in batch if i >= 0]
        assert sorted(seen) == list(range(len(sizes))) and len(counts) == 1


def test_a_budget_of_tokens_bounds_micro_batches():
    lengths = [5, 5, 5, 20, 1, 1]
    assert list(MicroBatchSampler(lengths, 4, max_tokens=11)) == [[0, 1], [2], [3], [4, 5]]
    assert list(MicroBatchSampler(lengths, 4)) == [[0, 1, 2, 3], [4, 5]]


def test_remove_none_values():
    rows = [{"a": None, "b": [{"c": None, "d": 1}, None]}, None]
    assert remove_none_values(rows) == [{"b": [{"d": 1}]}]
    with pytest.raises(TypeError, match="Only lists and dictionaries"):
        remove_none_values(3)
