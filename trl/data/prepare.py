"""Preparing a dataset once: encoded over several processes, cached, and cut to length."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.fingerprint import Hasher

from ..text import count
from .encode import TextEncoder
from .packing import ragged_ranges, windows, wrapped
from .rows import Document
from .supervised import Batch, Kind, SupervisedOptions, clipped, encode_supervised

# Changed with everything that changes what a prepared row holds.
VERSION = 3
BATCH = 1000
ROWS_PER_PROCESS = 10_000  # fewer are done before another process has started
TRUNCATION_MODES = {"keep_start": "cut", "keep_end": "cut_start"}
SUPERVISED = Features(
    input_ids=List(Value("int32")),
    trained_spans=List(Value("int32")),
    source=Value("int64"),
    merged=Value("int32"),
    origin=Value("string"),
)
D = TypeVar("D", Dataset, IterableDataset)
T = TypeVar("T")


def _integers(values: Sequence[int]) -> pa.Array:
    return pa.array(np.array(values, dtype=np.int32))


def ragged(
    rows: Sequence[Sequence[Any]], column: Callable[[Sequence[Any]], pa.Array] = _integers
) -> pa.Array:
    """Make an Arrow column of lists, of integers many times faster than Arrow does.

    Args:
        rows: the lists.
        column: makes a column of all their items.
    """
    bounds = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(bounds), column(list(chain.from_iterable(rows))))


def prepared(
    dataset: D,
    encode: Callable[[pa.Table, list[int]], pa.Table],
    key: Sequence[Any],
    features: Features,
    num_proc: int | None = None,
) -> D:
    """Encode all rows of a dataset.

    The result of an equal call is read from the cache of `datasets`; a stream is encoded while
    it is read.

    Args:
        dataset: any number of rows.
        encode: makes prepared rows of a batch and of the places of its rows in the dataset.
        key: everything the result depends on, besides the rows.
        features: columns of the prepared rows.
        num_proc (`int`, *optional*): processes; None chooses by rows and cores.
    """
    options: dict[str, Any] = {"with_indices": True, "batched": True, "batch_size": BATCH}
    options["features"] = features
    if isinstance(dataset, Dataset):
        words = [VERSION, dataset._fingerprint, *key]
        options |= {
            "remove_columns": dataset.column_names,
            "new_fingerprint": hashlib.sha256(Hasher.hash(words).encode()).hexdigest()[:32],
            "num_proc": num_proc or default_processes(len(dataset)),
            "desc": "Tokenizing",
        }
    return dataset.with_format("arrow").map(encode, **options).with_format(None)


def first_row(dataset: Dataset | IterableDataset) -> dict[str, Any]:
    """The row that decides what the examples of a dataset are.

    Raises:
        ValueError: if there is none.
    """
    found = next(iter(dataset), None)
    if found is None:
        raise ValueError("The dataset has no rows.")
    return found


def default_processes(rows: int) -> int | None:
    """Processes that are worth starting for so many rows; None for this one alone."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = min(cores or 1, rows // ROWS_PER_PROCESS)
    return count if count > 1 else None


@dataclass
class _EncodeSupervised:
    kind: Kind
    encoder: TextEncoder
    options: SupervisedOptions

    def __call__(self, table: pa.Table, index: list[int]) -> pa.Table:
        batch = {name: table.column(name).to_pylist() for name in table.column_names}
        how = self.kind, self.encoder, self.options
        found = naming_rows(lambda part: encode_supervised(part, *how), batch, index)
        origins = batch.get(self.options.source_column, [""] * len(index))
        return pa.table(
            {
                "input_ids": ragged(found.input_ids),
                "trained_spans": ragged(found.trained_spans),
                "source": pa.array([index[i] for i in found.source], pa.int64()),
                "merged": pa.array(found.merged, pa.int32()),
                "origin": pa.array([str(origins[i]) for i in found.source]),
            }
        )


def naming_rows(encode: Callable[[Batch], T], batch: Batch, index: Sequence[int]) -> T:
    """Encode the columns of a batch; an error names the row of the dataset that has it alone."""
    try:
        return encode(batch)
    except Exception:
        for place, row in enumerate(index):
            try:
                encode({name: values[place : place + 1] for name, values in batch.items()})
            except Exception as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"Row {row} of the dataset: {error}") from error
        raise


def prepare_supervised(
    dataset: D, encoder: TextEncoder, options: SupervisedOptions, num_proc: int | None = None
) -> D:
    """Encode a dataset for supervised fine-tuning, in full length.

    Args:
        dataset: one of the types that `SupervisedOptions.kind` knows; its first row decides.
        encoder, options: how.
        num_proc (`int`, *optional*): processes; None chooses.

    Returns:
        Columns `input_ids`, `trained_spans` (start, stop, start, stop, ... of the tokens in the
        loss), `source` (row of the dataset), `merged` (tokens over the edge of the trained part)
        and `origin` (see `SupervisedOptions.source_column`). A stream gives them while it is read.

    Raises:
        ValueError: if the dataset is empty, or its rows cannot be read.
    """
    kind = options.kind(first_row(dataset))
    key = [kind, encoder.digest, *dataclasses.astuple(options)]
    return prepared(dataset, _EncodeSupervised(kind, encoder, options), key, SUPERVISED, num_proc)


@dataclass(frozen=True)
class LengthReport:
    """What became of the rows of a dataset when they were cut to length."""

    rows: int
    kept: int  # rows to train on; more than before where long ones were split
    long: int  # rows over the limit
    tokens_lost: int
    trained_lost: int
    untrained: tuple[int, ...]  # rows of the dataset left without a trained token
    merged: int  # rows with a token over the edge of what is trained

    def lines(self, max_length: int | None, long_rows: str) -> list[str]:
        """Say it in sentences; none if there is nothing to say."""
        rows = count(self.rows, "row")
        cut = (
            f"{self.long} of {rows} longer than max_length={max_length} (long_rows={long_rows!r}): "
            f"{count(self.tokens_lost, 'token')} left out, {self.trained_lost} of them trained."
        )
        merged = (
            f"{self.merged} of {rows} with a token that stands for characters of both the prompt "
            "and what is trained on; it is trained on."
        )
        said = [cut] * bool(self.long) + nothing_left(self.untrained, rows, "no token to train on")
        return said + [merged] * bool(self.merged)


def nothing_left(gone: Sequence[int], rows: str, what: str) -> list[str]:
    """Name the first three rows that are left out, if there are any."""
    named = ", ".join(map(str, gone[:3])) + (", ..." if len(gone) > 3 else "")
    return [f"{len(gone)} of {rows} with {what}, left out: {named}."] * bool(gone)


class SupervisedDataset:
    """Prepared documents, cut to length; tokens stay on disk until they are asked for.

    Args:
        table: as of `prepare_supervised`.
        max_length (`int`, *optional*): tokens of a document.
        long_rows (`str`): what is done with longer ones: "cut" keeps the first tokens,
            "cut_start" the last ones, "drop" leaves them out, "split" makes several documents,
            "error" refuses them. "keep_start" and "keep_end" mean the first two. "wrapped" lays all
            end to end and cuts every `max_length` tokens; the pieces are documents.

    Attributes:
        lengths: (documents,) tokens.
        rows (`Dataset`): as given.
        report (`LengthReport`): counts.

    Raises:
        ValueError: if no row is left, or at a long one with `long_rows="error"`.
    """

    def __init__(self, table: Dataset, max_length: int | None = None, long_rows: str = "cut"):
        long_rows = TRUNCATION_MODES.get(long_rows, long_rows)
        self.rows = table
        self._table = table.with_format("numpy")
        whole = row_lengths(table, "input_ids")
        self._source = self._table["source"][:]
        row, start, stop = pieces(whole, max_length, long_rows, self._source)
        trained = trained_in(table, row, start, stop)
        kept = trained > 0
        self._row, self._start, self._stop = row[kept], start[kept], stop[kept]
        self.lengths = self._stop - self._start
        full = trained_in(table, np.arange(len(whole)), np.zeros_like(whole), whole)
        over = np.zeros(len(whole), dtype=bool) if max_length is None else whole > max_length
        untrained = ~np.isin(np.arange(len(whole)), self._row)
        untrained &= ~over if long_rows == "drop" else True
        self.report = LengthReport(
            rows=len(whole),
            kept=len(self._row),
            long=int(over.sum()),
            tokens_lost=int(whole.sum() - self.lengths.sum()),
            trained_lost=int(full.sum() - trained.sum()),
            untrained=tuple(self._source[untrained].tolist()),
            merged=int((self._table["merged"][:] > 0).sum()),
        )
        if not kept.any():
            raise ValueError(
                f"None of the {len(whole)} rows has a token to train on"
                + (f" with max_length={max_length}." if max_length else ".")
                + " Raise max_length, or look at the masks of the dataset."
            )

    def __len__(self) -> int:
        return len(self._row)

    def __getitem__(self, place: int) -> Document:
        at = place if place >= 0 else ~place  # see `RankBatches`
        row = self._table[int(self._row[at])]
        found = document(row, int(self._start[at]), int(self._stop[at]))
        return found if place >= 0 else found.uncounted()


class LazySupervisedDataset:
    """Documents that are encoded when they are asked for, a micro-batch at a time.

    Args:
        dataset, encoder, options: as for `prepare_supervised`.
        max_length, long_rows: as for `documents`.
    """

    def __init__(
        self,
        dataset: Dataset,
        encoder: TextEncoder,
        options: SupervisedOptions,
        max_length: int | None = None,
        long_rows: str = "cut",
    ):
        self.rows = dataset
        self.lengths = np.zeros(len(dataset), dtype=np.int64)  # nobody knows them before
        self._arrow = dataset.with_format("arrow")
        self._encode = _EncodeSupervised(options.kind(first_row(dataset)), encoder, options)
        self._limits = max_length, long_rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> list[Document]:
        return self.__getitems__([place])

    def __getitems__(self, places: list[int]) -> list[Document]:
        """The documents of some rows, without those that have no token to train on.

        If none is left, or all places are negative (see `RankBatches`), one that does not count.
        """
        at = [place if place >= 0 else ~place for place in places]
        rows = self._encode(self._arrow[at], at).to_pylist()
        found = [one for row in rows for one in documents(row, *self._limits)]
        if not found or places[0] < 0:
            return [Document.filler(at[0])]
        return found


def document(row: dict[str, Any], start: int = 0, stop: int | None = None) -> Document:
    """Make a document of (a piece of) a prepared row."""
    ids = np.asarray(row["input_ids"], dtype=np.int32)[start:stop]
    trained = np.zeros(len(ids), dtype=bool)
    spans = clipped(list(row["trained_spans"]), start + 1, start + len(ids))
    for first, last in zip(spans[::2], spans[1::2], strict=True):
        trained[first - start : last - start] = True
    origin = row.get("origin", "")
    return Document(ids=ids, trained=trained, source=int(row["source"]), origin=origin)


def documents(row: dict[str, Any], max_length: int | None, long_rows: str) -> list[Document]:
    """Make the documents of a prepared row that have a token to train on.

    Args:
        row: as of `prepare_supervised`.
        max_length, long_rows: as for `SupervisedDataset`; "wrapped" is "split" here.

    Raises:
        ValueError: for a long row with `long_rows="error"`.
    """
    how = "split" if long_rows == "wrapped" else TRUNCATION_MODES.get(long_rows, long_rows)
    whole, source = np.array([len(row["input_ids"])]), np.array([row["source"]])
    _, starts, stops = pieces(whole, max_length, how, source)
    pairs = zip(starts.tolist(), stops.tolist(), strict=True)
    found = [document(row, start, stop) for start, stop in pairs]
    return [one for one in found if one.trained.any()]


def pieces(
    whole: np.ndarray, size: int | None, long_rows: str, source: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut rows of so many tokens to length: row, first token and end of each piece.

    Args:
        whole, source: tokens of each row, and its name in messages.
        size, long_rows: as of `SupervisedDataset`, without the second names.
    """
    if size is None:
        return np.arange(len(whole)), np.zeros_like(whole), whole
    if long_rows == "split":
        return windows(whole, size)
    if long_rows == "wrapped":
        return wrapped(whole, size)
    over = whole > size
    if long_rows == "error" and over.any():
        named = ", ".join(map(str, source[over][:3]))
        raise ValueError(
            f"{over.sum()} of {count(len(whole), 'row')} with more than max_length={size} "
            f"tokens, among them {named}. Raise max_length, or choose long_rows='cut', 'drop' or "
            "'split'."
        )
    rows = np.flatnonzero(~over) if long_rows == "drop" else np.arange(len(whole))
    length = np.minimum(whole[rows], size)
    start = whole[rows] - length if long_rows == "cut_start" else np.zeros_like(length)
    return rows, start, start + length


def row_lengths(table: Dataset, column: str) -> np.ndarray:
    """Items of each list of a column, (rows,) int64."""
    return list_column(table, column).value_lengths().to_numpy().astype(np.int64)


def trained_in(
    table: Dataset, row: np.ndarray, start: np.ndarray, stop: np.ndarray, first: int = 1
) -> np.ndarray:
    """Count the trained tokens of pieces of prepared rows, (pieces,) int64.

    Args:
        table: as of `prepare_supervised`.
        row, start, stop: row of each piece, its first token and its end.
        first (`int`): tokens at the beginning of a piece that are not predicted.
    """
    spans = list_column(table, "trained_spans")
    counts = spans.value_lengths().to_numpy() // 2
    flat = spans.flatten().to_numpy().reshape(-1, 2).astype(np.int64)
    # Each piece meets every span of its row.
    piece = np.repeat(np.arange(len(row)), counts[row])
    span = ragged_ranges((np.cumsum(counts) - counts)[row], counts[row])
    begin = np.maximum(flat[span, 0], start[piece] + first)
    inside = np.minimum(flat[span, 1], stop[piece]) - begin
    return np.bincount(piece, np.maximum(inside, 0), len(row)).astype(np.int64)


def list_column(table: Dataset, column: str) -> pa.ListArray:
    """All rows of a column of lists."""
    found = table.data.column(column)
    if table._indices is not None:
        found = found.take(table._indices.column(0))
    return found.combine_chunks()
