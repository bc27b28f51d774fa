import copy
import pickle

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from trl.data.arrow_lists import (
    Ranges,
    arrow_column,
    count_in_ranges,
    cut_dataset,
    cut_lists,
    list_lengths,
    row_lengths,
    spread_lists,
    spread_numbers,
    with_columns,
)

lists_in_chunks = st.lists(
    st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4), min_size=1
)


@given(lists_in_chunks, st.data())
def test_lists_are_cut_wherever_their_chunks_end(chunks, data):
    lists = pa.chunked_array(chunks, pa.list_(pa.int32()))
    flat = [value for rows in chunks for row in rows for value in row]
    edges = sorted(data.draw(st.lists(st.integers(0, len(flat)), max_size=8)))
    starts, stops = np.array(edges[::2][: len(edges) // 2], int), np.array(edges[1::2], int)
    found = cut_lists(lists, Ranges(starts, stops)).to_pylist()
    assert found[::2] == [flat[start:stop] for start, stop in zip(starts, stops, strict=True)]
    assert len(found) == 2 * len(starts)


def test_tokens_are_not_copied_by_cutting():
    values = pa.array(range(1000), pa.int32())
    lists = pa.chunked_array(
        [pa.ListArray.from_arrays(pa.array([0, 600, 1000], pa.int32()), values)]
    )
    (cut,) = cut_lists(lists, Ranges(np.array([10, 600]), np.array([500, 900]))).chunks
    assert cut.values.buffers()[1].address == values.buffers()[1].address


def test_what_views_other_data_is_made_again_elsewhere():
    dataset = Dataset.from_dict({"ids": [[1, 2, 3], [4, 5, 6]], "row": [0, 1]})
    ranges = {"ids": Ranges(np.array([1, 3]), np.array([3, 4]))}
    found = cut_dataset(dataset, ranges, np.array([0, 1]), "name")
    assert found[:] == {"ids": [[2, 3], [4]], "row": [0, 1]}
    assert pickle.loads(pickle.dumps(found))[:] == found[:] == copy.deepcopy(found)[:]


def test_a_column_may_have_more_items_than_an_array_holds():
    size = 3 << 29
    bits = pa.Array.from_buffers(pa.bool_(), size, [None, pa.py_buffer(np.zeros(size // 8, "u1"))])
    chunk = pa.ListArray.from_arrays(pa.array([0, size], pa.int32()), bits)
    table = pa.table({"trained": pa.chunked_array([chunk, chunk])})
    lists = arrow_column(Dataset(table, fingerprint="long"), "trained")
    assert list_lengths(lists).tolist() == [size, size]


def test_rows_of_a_column_are_those_that_were_selected():
    dataset = Dataset.from_dict({"ids": [[0], [1, 1], [2], [], [4]]})
    for rows in (dataset, dataset.select([3, 1, 0]), dataset.shuffle(seed=2), dataset.select([])):
        assert arrow_column(rows, "ids").to_pylist() == rows["ids"][:]
        assert row_lengths(rows, "ids").tolist() == list(map(len, rows["ids"]))
    assert dataset.select([3, 1, 0])._indices is not None, "which the rows are read by"


def test_lengths_of_lists_in_lists_are_of_all_their_items():
    lists = pa.chunked_array([[[[1], [2, 3]], []], [[[4, 5, 6]]]], pa.list_(pa.list_(pa.int32())))
    assert list_lengths(lists).tolist() == [3, 0, 3]
    assert list_lengths(pa.chunked_array([[[1], None]])).tolist() == [1, 0]


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 4))
def test_values_are_counted_but_for_the_first_of_a_range(flags, size):
    edges = np.unique([*range(0, len(flags), size), len(flags)])
    starts, stops = edges[:-1], edges[1:]
    values = pa.chunked_array([flags[:7], flags[7:]], pa.bool_())
    found = count_in_ranges(values, lambda chunk: chunk, starts, stops)
    assert found.tolist() == [
        sum(flags[a + 1 : b]) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)
    ]


@pytest.mark.parametrize("rows", [None, [0, 2, 3], [3, 0], [1, 1]])
def test_columns_are_added_to_the_rows_that_are_meant(rows):
    dataset = Dataset.from_dict({"ids": [[0], [1, 1], [2], []]})
    dataset = dataset if rows is None else dataset.select(rows)
    count = len(dataset)
    numbers = {"n": np.arange(count)}
    lists = Dataset.from_dict({"more": [[row] * row for row in range(count)]})
    found = with_columns(dataset, lambda *where: spread_numbers(numbers, *where), "one")
    found = with_columns(found, lambda *where: spread_lists(lists, *where), "two")
    assert found["ids"][:] == dataset["ids"][:] and found["n"][:] == list(range(count))
    assert found["more"][:] == lists["more"][:]
    assert found.column_names == ["ids", "n", "more"]
