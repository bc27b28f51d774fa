"""Which documents go into one micro-batch, and datasets packed or cut as a whole."""

from collections.abc import Iterator, Sequence
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

    "split" and "wrapped" cut where rows end, and every `size` tokens of a row, or of all;
    "wrapped_across" does the latter alone. "keep_end" has the last tokens of each row, "drop" none
    of a longer one, and others, such as "cut" and "keep_start", the first ones.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    if size is None:
        return starts, ends
    if how not in ("split", "wrapped", "wrapped_across"):
        kept = np.where(lengths > size, 0 if how == "drop" else size, lengths)
        starts = ends - kept if how == "keep_end" else starts
        return starts, starts + kept
    inner = np.arange(0, lengths.sum(), size)
    if how == "split":
        counts = -(-lengths // size)
        inner = np.repeat(starts, counts) + size * ragged_ranges(np.zeros_like(counts), counts)
    kept = ends[-1:] if how == "wrapped_across" else ends
    cuts = np.unique(np.concatenate([[0], inner, kept]))
    return cuts[:-1], cuts[1:]


def ragged_ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenate `range(start, start + count)` of all starts and counts."""
    before = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(starts - before, counts)


def share_of_rank(batches: Sequence[list[int]], rank: int, ranks: int) -> Iterator[list[int]]:
    """The micro-batches of a rank; if none is left for it, an item that does not count, `~item`."""
    for first in range(0, len(batches), ranks):
        mine = first + rank
        yield batches[mine] if mine < len(batches) else [~batches[first][0]]


class MicroBatchSampler(Sampler[list[int]]):
    """Yields the documents of a rank's micro-batches, in an order that seed and epoch decide.

    A micro-batch has `rows` documents, or packs of best fitting documents with `pack_size` tokens,
    and at most `max_tokens`; a longer document is alone. Without a seed, the order stays. `place`
    is the rank of this process, and how many there are. Epochs have equal numbers of micro-batches:
    with `max_tokens` the same ones in another order, else new ones.
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
        self._rows, self._max_tokens, self._pack_size = rows, max_tokens, pack_size
        self._seed, self._place = seed, place
        self._epoch = 0
        self._made: tuple[int, list[list[int]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return share_of_rank(self.batches(), *self._place)

    def __len__(self) -> int:
        return -(-len(self.batches()) // self._place[1])

    def batches(self) -> list[list[int]]:
        """The micro-batches of the epoch, of all ranks."""
        if self._made is None or self._made[0] != self._epoch:
            if self._seed is None or self._max_tokens is None:
                found = self._gathered(self._units(self._epoch))
            else:  # Each epoch must have as many, which documents in another order would not fill.
                rng = np.random.default_rng([self._seed, self._epoch, 1])
                same = self._gathered(self._units(0))
                found = [same[i] for i in rng.permutation(len(same))]
            self._made = self._epoch, found
        return self._made[1]

    def _units(self, epoch: int) -> list[list[int]]:
        """Documents, or packs of them, in the order of an epoch."""
        order = np.arange(len(self._lengths))
        if self._seed is not None:
            rng = np.random.default_rng([self._seed, epoch])
            order = rng.permutation(len(order))
        units = [[document] for document in order.tolist()]
        if self._pack_size is not None:
            packs = best_fit(self._lengths[order], self._pack_size)
            units = [order[pack].tolist() for pack in packs]
            if self._seed is not None:
                units = [units[i] for i in rng.permutation(len(units))]
        return units

    def _gathered(self, units: list[list[int]]) -> list[list[int]]:
        found: list[list[int]] = []
        count = tokens = 0
        lengths = self._lengths.tolist()
        for unit in units:
            size = sum(lengths[document] for document in unit)
            full = self._max_tokens is not None and tokens + size > self._max_tokens
            if not found or count == self._rows or full:
                found.append([])
                count = tokens = 0
            found[-1] += unit
            count, tokens = count + 1, tokens + size
        return found


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
    return _mapped(dataset, _pack_table, options, map_kwargs)


def truncate_dataset(dataset: D, max_length: int, map_kwargs: dict[str, Any] | None = None) -> D:
    """Cut every list of a dataset to its first `max_length` items; other columns are kept."""
    return _mapped(dataset, _truncate_table, {"max_length": max_length}, map_kwargs)


def _mapped(dataset: Any, function: Any, options: dict[str, Any], given: Any) -> Any:
    given = {"batched": True, "fn_kwargs": options} | (given or {})
    if isinstance(dataset, DatasetDict):
        return DatasetDict({k: _mapped(v, function, options, given) for k, v in dataset.items()})
    if isinstance(dataset, IterableDataset):
        return dataset.with_format("arrow").map(function, **given).with_format(None)
    before, given = dataset.format, {"batch_size": None} | given
    packed = dataset.with_format("arrow").map(function, **given)
    return packed.with_format(before["type"], **before["format_kwargs"])


def _pack_table(table: pa.Table, seq_length: int, strategy: str) -> pa.Table:
    columns = {name: _lists(table, name) for name in table.column_names}
    sizes = {name: column.value_lengths().to_numpy() for name, column in columns.items()}
    lengths = next(iter(sizes.values()))
    for name, found in sizes.items():
        if not np.array_equal(found, lengths):
            row = int(np.flatnonzero(found != lengths)[0])
            raise ValueError(
                f"Row {row}: column {name!r} has {found[row]} items and column "
                f"{table.column_names[0]!r} has {lengths[row]}; they must be equally long."
            )
    start, stop = pieces(lengths, seq_length, STRATEGIES[strategy])
    if strategy == "wrapped":
        packs = [[piece] for piece in range(len(start))]
    else:
        packs = best_fit(stop - start, seq_length)
    order = np.concatenate([*packs, []]).astype(np.int64)
    counts, members = (stop - start)[order], np.cumsum([0, *map(len, packs)])
    bounds = np.concatenate([[0], np.cumsum(counts)])[members]
    chosen = pa.array(ragged_ranges(start[order], counts))
    rows = partial(pa.ListArray.from_arrays, pa.array(bounds, pa.int32()))
    found = {name: rows(column.flatten().take(chosen)) for name, column in columns.items()}
    if strategy != "wrapped":
        found["seq_lengths"] = pa.ListArray.from_arrays(pa.array(members, pa.int32()), counts)
    return pa.table(found)


def _truncate_table(table: pa.Table, max_length: int) -> pa.Table:
    columns = dict(zip(table.column_names, table.columns, strict=True))
    for name in [name for name, column in columns.items() if _is_list(column.type)]:
        columns[name] = pc.list_slice(_lists(table, name), 0, max_length)
    return pa.table(columns)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _lists(table: pa.Table, name: str) -> Any:
    column = table.column(name)
    if not _is_list(column.type) or column.null_count:
        raise TypeError(f"Column {name!r} must consist of lists, not {column.type}.")
    return column.combine_chunks()


def remove_none_values(example: Any) -> Any:
    """Leave out all that is None in nested lists and dictionaries; others are a TypeError."""
    if isinstance(example, list):
        return [_bare(item) for item in example if item is not None]
    if isinstance(example, dict):
        return {key: _bare(item) for key, item in example.items() if item is not None}
    raise TypeError(f"Only lists and dictionaries can hold None values, not {type(example)}.")


def _bare(item: Any) -> Any:
    return remove_none_values(item) if isinstance(item, list | dict) else item
