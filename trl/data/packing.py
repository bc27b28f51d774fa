"""Which rows go into one micro-batch, and functions that pack or cut whole datasets."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, IterableDataset
from torch.utils.data import Sampler

from ..ops.packing import best_fit

D = TypeVar("D", Dataset, DatasetDict, IterableDataset)
STRATEGIES = {"bfd": "cut", "bfd_split": "split", "wrapped": "wrapped_across"}  # as for `pieces`


def pieces(
    lengths: Sequence[int] | np.ndarray, size: int | None = None, how: str = "cut"
) -> tuple[np.ndarray, np.ndarray]:
    """Cut rows that lie end to end into pieces of at most `size` tokens: start and end of each.

    "split" starts a new piece every `size` tokens of a row, "wrapped" every `size` tokens of all
    rows and at the end of each row, "wrapped_across" every `size` tokens of all rows alone.
    "keep_end" keeps the last tokens of a longer row, "drop" none of them, and others, such as "cut"
    and "keep_start", the first ones.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    if size is None:
        return starts, ends
    if how not in ("split", "wrapped", "wrapped_across"):
        cut_lengths = np.where(lengths > size, 0 if how == "drop" else size, lengths)
        starts = ends - cut_lengths if how == "keep_end" else starts
        return starts, starts + cut_lengths
    inner = np.arange(0, lengths.sum(), size)
    if how == "split":
        numbers = -(-lengths // size)  # of pieces of each row
        inner = np.repeat(starts, numbers) + size * ragged_ranges(np.zeros_like(numbers), numbers)
    outer = ends[-1:] if how == "wrapped_across" else ends
    edges = np.unique(np.concatenate([[0], inner, outer]))
    return edges[:-1], edges[1:]


def ragged_ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Concatenate `range(start, start + size)` of all starts and sizes."""
    before = np.cumsum(sizes) - sizes
    return np.arange(int(sizes.sum())) + np.repeat(starts - before, sizes)


def share_of_rank(batches: Sequence[list[int]], rank: int, ranks: int) -> Iterator[list[int]]:
    """Deal out micro-batches to a rank; if none is left for it, it gets a filler, `~row`."""
    for first in range(0, len(batches), ranks):
        mine = first + rank
        yield batches[mine] if mine < len(batches) else [~batches[first][0]]


class MicroBatchSampler(Sampler[list[int]]):
    """Yields the rows of a rank's micro-batches, in an order that depends on seed and epoch.

    A micro-batch has `rows` rows, or packs of rows that fit together in `pack_size` tokens, and at
    most `max_tokens` tokens; a longer row is alone. Without a seed, the order is that of the
    dataset. `place` is the rank of this process, and how many there are. All epochs have equally
    many micro-batches: with `max_tokens` the same ones in another order, else new ones.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        rows: int,
        max_tokens: int | None = None,
        pack_size: int | None = None,
        seed: int | None = None,
        place: tuple[int, int] = (0, 1),
    ):
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._rows = rows
        self._max_tokens = max_tokens
        self._pack_size = pack_size
        self._seed = seed
        self._place = place
        self._epoch = 0
        self._cached_batches: list[list[int]] | None = None  # of the epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._cached_batches = None

    def __iter__(self) -> Iterator[list[int]]:
        return share_of_rank(self.batches(), *self._place)

    def __len__(self) -> int:
        return -(-len(self.batches()) // self._place[1])

    def batches(self) -> list[list[int]]:
        """The micro-batches of the epoch, of all ranks."""
        if self._cached_batches is None:
            self._cached_batches = self._make_batches()
        return self._cached_batches

    def _make_batches(self) -> list[list[int]]:
        if self._seed is None or self._max_tokens is None:
            return self._gather(self._units(self._epoch))
        # Rows in another order would fill another number of micro-batches.
        batches = self._gather(self._units(0))
        rng = np.random.default_rng([self._seed, self._epoch, 1])
        return [batches[number] for number in rng.permutation(len(batches))]

    def _units(self, epoch: int) -> list[list[int]]:
        """Rows, or packs of them, in the order of an epoch."""
        order = np.arange(len(self._lengths))
        if self._seed is not None:
            rng = np.random.default_rng([self._seed, epoch])
            order = rng.permutation(len(order))
        units = [[row] for row in order.tolist()]
        if self._pack_size is not None:
            packs = best_fit(self._lengths[order], self._pack_size)
            units = [order[pack].tolist() for pack in packs]
            if self._seed is not None:
                units = [units[i] for i in rng.permutation(len(units))]
        return units

    def _gather(self, units: list[list[int]]) -> list[list[int]]:
        batches: list[list[int]] = []
        num_units = num_tokens = 0  # of the last micro-batch
        lengths = self._lengths.tolist()
        for unit in units:
            unit_tokens = sum(lengths[row] for row in unit)
            is_over = self._max_tokens is not None and num_tokens + unit_tokens > self._max_tokens
            if not batches or num_units == self._rows or is_over:
                batches.append([])
                num_units = num_tokens = 0
            batches[-1] += unit
            num_units += 1
            num_tokens += unit_tokens
        return batches


def pack_dataset(
    dataset: D, seq_length: int, strategy: str = "bfd", map_kwargs: dict[str, Any] | None = None
) -> D:
    """Pack the rows of a dataset, lists of equal lengths, into rows of at most `seq_length` tokens.

    The strategy "bfd" cuts long rows and packs the rest where it fits best; "bfd_split" keeps the
    rest of long rows as rows; "wrapped" lays all rows end to end. The first two add the column
    `seq_lengths` with the lengths of the rows in a pack. `map_kwargs` are arguments of
    `Dataset.map`: without `batch_size` the whole dataset is packed at once, a stream by the batch.

    TypeError: a column does not consist of lists. ValueError: the lists of a row differ in length.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} must be one of {', '.join(STRATEGIES)}.")
    options = {"seq_length": seq_length, "strategy": strategy}
    return _map_tables(dataset, _pack_table, options, map_kwargs)


def truncate_dataset(dataset: D, max_length: int, map_kwargs: dict[str, Any] | None = None) -> D:
    """Cut every list of a dataset to its first `max_length` items; other columns are kept."""
    return _map_tables(dataset, _truncate_table, {"max_length": max_length}, map_kwargs)


def _map_tables(
    dataset: D,
    function: Callable[..., pa.Table],
    options: dict[str, Any],
    map_kwargs: dict[str, Any] | None,
) -> D:
    """Map a function of Arrow tables, which has these options, over a dataset."""
    arguments = {"batched": True, "fn_kwargs": options} | (map_kwargs or {})
    if isinstance(dataset, DatasetDict):
        splits = {
            name: _map_tables(split, function, options, map_kwargs)
            for name, split in dataset.items()
        }
        return DatasetDict(splits)
    if isinstance(dataset, IterableDataset):
        return dataset.with_format("arrow").map(function, **arguments).with_format(None)
    arguments = {"batch_size": None} | arguments
    before = dataset.format
    packed = dataset.with_format("arrow").map(function, **arguments)
    return packed.with_format(before["type"], **before["format_kwargs"])


def _pack_table(table: pa.Table, seq_length: int, strategy: str) -> pa.Table:
    columns = {name: _lists(table, name) for name in table.column_names}
    sizes = {name: column.value_lengths().to_numpy() for name, column in columns.items()}
    lengths = next(iter(sizes.values()))
    for name, column_sizes in sizes.items():
        if not np.array_equal(column_sizes, lengths):
            row = int(np.flatnonzero(column_sizes != lengths)[0])
            raise ValueError(
                f"Row {row}: column {name!r} has {column_sizes[row]} items and column "
                f"{table.column_names[0]!r} has {lengths[row]}; they must be equally long."
            )
    start, stop = pieces(lengths, seq_length, STRATEGIES[strategy])
    if strategy == "wrapped":
        packs = [[piece] for piece in range(len(start))]
    else:
        packs = best_fit(stop - start, seq_length)
    order = np.concatenate([*packs, []]).astype(np.int64)
    piece_lengths = (stop - start)[order]
    pack_edges = np.cumsum([0, *map(len, packs)])  # pieces before each pack
    token_edges = np.concatenate([[0], np.cumsum(piece_lengths)])[pack_edges]
    tokens = pa.array(ragged_ranges(start[order], piece_lengths))
    make_rows = partial(pa.ListArray.from_arrays, pa.array(token_edges, pa.int32()))
    packed = {name: make_rows(column.flatten().take(tokens)) for name, column in columns.items()}
    if strategy != "wrapped":
        edges = pa.array(pack_edges, pa.int32())
        packed["seq_lengths"] = pa.ListArray.from_arrays(edges, piece_lengths)
    return pa.table(packed)


def _truncate_table(table: pa.Table, max_length: int) -> pa.Table:
    columns = dict(zip(table.column_names, table.columns, strict=True))
    for name in [name for name, column in columns.items() if _is_list(column.type)]:
        columns[name] = pc.list_slice(_lists(table, name), 0, max_length)
    return pa.table(columns)


def _is_list(data_type: pa.DataType) -> bool:
    return pa.types.is_list(data_type) or pa.types.is_large_list(data_type)


def _lists(table: pa.Table, name: str) -> Any:
    column = table.column(name)
    if not _is_list(column.type) or column.null_count:
        raise TypeError(f"Column {name!r} must consist of lists, not {column.type}.")
    return column.combine_chunks()


def remove_none_values(example: object) -> Any:
    """Leave out all that is None in nested lists and dictionaries; others are a TypeError."""
    if isinstance(example, list):
        return [_without_none(value) for value in example if value is not None]
    if isinstance(example, dict):
        return {key: _without_none(value) for key, value in example.items() if value is not None}
    raise TypeError(f"Only lists and dictionaries can hold None values, not {type(example)}.")


def _without_none(value: object) -> object:
    return remove_none_values(value) if isinstance(value, list | dict) else value
