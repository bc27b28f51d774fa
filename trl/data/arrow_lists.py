"""Columns of lists in Arrow tables, cut without copying what is in them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import methodcaller

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from datasets.table import InMemoryTable, concat_tables

COUNTED_AT_ONCE = 2**18  # tokens


def selected_rows(dataset: Dataset) -> pa.ChunkedArray | None:
    """The rows of its table that a dataset consists of, after a selection or a shuffle; else None.

    `datasets` 4.7 to 5.2 keep them private. What is public gathers rows one by one, or copies all
    columns.
    """
    return None if dataset._indices is None else dataset._indices.column(0)


def arrow_column(dataset: Dataset, name: str) -> pa.ChunkedArray:
    """All rows of a column, in chunks: one array holds no more than 2**31 items of lists."""
    column = dataset.data.column(name)
    rows = selected_rows(dataset)
    return column if rows is None else column.take(rows)


def numbers(dataset: Dataset, name: str) -> np.ndarray:
    """A column of numbers (rows,)."""
    return np.asarray(arrow_column(dataset, name))


def list_lengths(lists: pa.ChunkedArray) -> np.ndarray:
    """Count the items of each list, of lists in lists the innermost: (rows,) int64; 0 for None."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    if not pa.types.is_list(lists.type.value_type):
        return lengths
    inner = np.concatenate([[0], np.cumsum(list_lengths(pc.list_flatten(lists)))])
    ends = np.cumsum(lengths)
    return inner[ends] - inner[ends - lengths]


def count_in_ranges(
    values: pa.ChunkedArray,
    is_counted: Callable[[np.ndarray], np.ndarray],
    starts: np.ndarray,
    stops: np.ndarray,
) -> np.ndarray:
    """Count the values (N,) in ranges for which `is_counted` is true, but for their first: (R,).

    Ranges are in order and do not overlap. Memory does not grow with the values: `COUNTED_AT_ONCE`
    of them are read at a time.
    """
    edges = np.stack([np.minimum(starts + 1, stops), stops], axis=1).ravel()
    counted_before = np.zeros(len(edges), dtype=np.int64)  # in front of each edge
    total = 0
    for first in range(0, len(values), COUNTED_AT_ONCE):
        flags = is_counted(np.asarray(values[first : first + COUNTED_AT_ONCE]))
        sums = np.cumsum(flags, dtype=np.int64) + total
        low, high = np.searchsorted(edges, [first + 1, first + len(flags) + 1])
        counted_before[low:high] = sums[edges[low:high] - first - 1]
        total = sums[-1]
    return counted_before[1::2] - counted_before[::2]


def row_lengths(dataset: Dataset, name: str) -> np.ndarray:
    """Items of each row of a column of lists (rows,), without a look at the items."""
    return list_lengths(dataset.data.column(name))[_table_rows(dataset)]


# --- Cutting ---


@dataclass(frozen=True, eq=False)
class Ranges:
    """What is left of the lists of a column: ranges (rows,) of all its items end to end, in order.

    A range may go on into the next list.
    """

    starts: np.ndarray
    stops: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Items of each range."""
        return self.stops - self.starts


def cut_lists(lists: pa.ChunkedArray, ranges: Ranges) -> pa.ChunkedArray:
    """Make 2 R lists: those with even numbers are the ranges (R,), others what lies between them.

    Lists of Arrow lie end to end, so what is cut off must be in some list to keep the rest where it
    is. Nothing is copied but ranges over the edge of a chunk.
    """
    flat = pc.list_flatten(lists)
    ends = np.cumsum([len(chunk) for chunk in flat.chunks], dtype=np.int64)
    if not len(ends):
        return pa.chunked_array([[[]] * 2 * len(ranges.starts)], pa.list_(flat.type))
    chunk_numbers = np.searchsorted(ends, ranges.starts, side="right")
    chunk_numbers = np.minimum(chunk_numbers, len(ends) - 1)  # of empty ranges at the very end
    cut: list[pa.Array] = []
    for number, rows in _runs(chunk_numbers):
        first = ends[number] - len(flat.chunk(number))
        starts = ranges.starts[rows]
        stops = ranges.stops[rows]
        last = slice(starts[-1], stops[-1])
        is_whole = last.stop <= ends[number]
        if not is_whole:
            starts = starts[:-1]
            stops = stops[:-1]
        if len(starts):
            cut.append(_alternating(flat.chunk(number), starts - first, stops - first))
        if not is_whole:
            values = pa.concat_arrays(flat[last].chunks)
            cut.append(_alternating(values, np.array([0]), np.array([len(values)])))
    return pa.chunked_array(cut, pa.list_(flat.type))


def _runs(chunk_numbers: np.ndarray) -> Iterator[tuple[int, slice]]:
    """The rows of each chunk that has any."""
    edges = np.flatnonzero(np.diff(chunk_numbers)) + 1
    for start, stop in pairwise([0, *edges.tolist(), len(chunk_numbers)]):
        if start < stop:
            yield int(chunk_numbers[start]), slice(start, stop)


def _alternating(values: pa.Array, starts: np.ndarray, stops: np.ndarray) -> pa.ListArray:
    """Make lists of ranges of values, each followed by one of what lies before the next."""
    offsets = np.stack([starts, stops], axis=1).ravel()
    offsets = np.append(offsets, stops[-1:]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values)


class MadeTable(InMemoryTable):  # type: ignore[misc]
    """Arrow data that views other tables. Another process makes it again, as it is not sent."""

    def __init__(self, make: Callable[[], pa.Table], table: pa.Table | None = None):
        self.make = make
        super().__init__(make() if table is None else table)

    def __getstate__(self) -> dict[str, object]:
        return {"make": self.make}

    def __setstate__(self, state: dict[str, Callable[[], pa.Table]]) -> None:
        MadeTable.__init__(self, state["make"])

    def __deepcopy__(self, memo: object) -> "MadeTable":
        return self  # nothing changes it

    def _changed(self, change: Callable[[pa.Table], pa.Table]) -> "MadeTable":
        return MadeTable(partial(_make_changed, self.make, change), change(self.table))

    # What `datasets` calls to change columns; other methods give copies that are sent as they are.

    def replace_schema_metadata(self, metadata: dict[str, str]) -> "MadeTable":
        """Return the table with other metadata."""
        return self._changed(methodcaller("replace_schema_metadata", metadata))

    def select(self, columns: list[str]) -> "MadeTable":
        """Return the table with some columns."""
        return self._changed(methodcaller("select", columns))

    def drop(self, columns: list[str]) -> "MadeTable":
        """Return the table without some columns."""
        return self._changed(methodcaller("drop", columns))

    def rename_columns(self, names: list[str]) -> "MadeTable":
        """Return the table with other names."""
        return self._changed(methodcaller("rename_columns", names))


def _make_changed(make: Callable[[], pa.Table], change: Callable[[pa.Table], pa.Table]) -> pa.Table:
    return change(make())


def cut_table(dataset: Dataset, ranges: Mapping[str, Ranges], rows: np.ndarray) -> pa.Table:
    """Cut some columns, and repeat in the others what the given rows (R,) have.

    Of the 2 R rows, those with even numbers are meant (see `cut_lists`).
    """
    twice = pa.array(np.repeat(rows, 2))
    columns = {}
    for name in dataset.column_names:
        column = arrow_column(dataset, name)
        if name in ranges:
            columns[name] = cut_lists(column, ranges[name])
        else:
            columns[name] = column.take(twice)
    return pa.table(columns)


def cut_dataset(
    dataset: Dataset, ranges: Mapping[str, Ranges], rows: np.ndarray, fingerprint: str
) -> Dataset:
    """Return what `cut_table` makes, as a dataset of the R rows that are meant."""
    table = MadeTable(partial(cut_table, dataset, ranges, rows))
    meant = pa.table({"indices": pa.array(np.arange(0, 2 * len(rows), 2), pa.uint64())})
    return Dataset(
        table, info=dataset.info, indices_table=InMemoryTable(meant), fingerprint=fingerprint
    )


# --- Further columns ---


def with_columns(
    dataset: Dataset, make: Callable[[np.ndarray, int], pa.Table], fingerprint: str
) -> Dataset:
    """Add columns without copying the others.

    `make` puts values into a table with so many rows, at the given ones, which increase.
    """
    rows = _table_rows(dataset)
    if (np.diff(rows) <= 0).any():  # shuffled, or a row is there twice
        dataset = dataset.flatten_indices()
        rows = _table_rows(dataset)
    count = dataset.data.num_rows
    table = concat_tables([dataset.data, MadeTable(partial(make, rows, count))], axis=1)
    selected = selected_rows(dataset)
    indices = None if selected is None else InMemoryTable(pa.table({"indices": selected}))
    return Dataset(table, indices_table=indices, fingerprint=fingerprint)


def _table_rows(dataset: Dataset) -> np.ndarray:
    """The rows of its table that a dataset consists of."""
    rows = selected_rows(dataset)
    return np.arange(dataset.data.num_rows) if rows is None else np.asarray(rows).astype(np.int64)


def spread_numbers(columns: Mapping[str, np.ndarray], rows: np.ndarray, count: int) -> pa.Table:
    """Put numbers (R,) into the given rows (R,) of a table of `count`, 0 elsewhere."""
    spread = {}
    for name, values in columns.items():
        spread[name] = np.zeros(count, dtype=values.dtype)
        spread[name][rows] = values
    return pa.table(spread)


def spread_lists(lists: Dataset, rows: np.ndarray, count: int) -> pa.Table:
    """Put the lists (R,) of a dataset of one column into the given rows (R,) of a table of `count`.

    Other rows have empty lists. `rows` increase, so no list is copied.
    """
    (name,) = lists.column_names
    chunks: list[pa.Array] = []
    first = 0  # list of the chunk
    first_row = 0  # behind those of the chunks before
    column = arrow_column(lists, name)
    for chunk in column.chunks:
        is_last = first + len(chunk) == len(rows)
        end_row = count if is_last else int(rows[first + len(chunk)])
        sizes = np.zeros(end_row - first_row, dtype=np.int64)
        offsets = chunk.offsets.to_numpy()
        sizes[rows[first : first + len(chunk)] - first_row] = np.diff(offsets)
        edges = np.concatenate([offsets[:1], offsets[0] + np.cumsum(sizes)]).astype(np.int32)
        chunks.append(pa.ListArray.from_arrays(pa.array(edges), chunk.values))
        first += len(chunk)
        first_row = end_row
    return pa.table({name: pa.chunked_array(chunks, column.type)})
