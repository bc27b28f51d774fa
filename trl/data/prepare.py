"""Preparing a dataset once: encoded over several processes, cached, and cut to length."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.fingerprint import update_fingerprint
from transformers.utils import logging

from ..text import count
from .encode import TextEncoder
from .packing import windows, wrapped
from .rows import Document, uncounted
from .supervised import SupervisedOptions, encode_supervised

logger = logging.get_logger(__name__)

# Changed with everything that changes what a prepared row holds.
VERSION = 5
BATCH = 1000
CUT, LEFT_OUT = "is cut to length", "has nothing to train on, or is too long, and is left out"
ROWS_PER_PROCESS = 10_000  # fewer are done before another process has started
SUPERVISED = Features(
    input_ids=List(Value("int32")),
    trained=List(Value("bool")),
    source=Value("int64"),
    merged=Value("int32"),
    origin=Value("string"),
)
D = TypeVar("D", Dataset, IterableDataset)
Example = dict[str, Any]
Encoded = Sequence[tuple[Any, ...]]  # values by row
Encode = Callable[[list[Example]], Encoded]


def column(values: Sequence[Any], feature: Any) -> pa.Array:
    """Make an Arrow column; one of lists, or of lists of lists, many times faster than Arrow."""
    if not isinstance(feature, List):
        return pa.array(values, feature.pa_type)
    bounds = pa.array(np.cumsum([0, *map(len, values)], dtype=np.int32))
    if isinstance(feature.feature, List):
        inner = column(list(chain.from_iterable(values)), feature.feature)
    else:
        kind = np.dtype(feature.feature.dtype)
        rows = [np.zeros(0, kind), *(np.asarray(row, kind) for row in values)]
        inner = pa.array(np.concatenate(rows))
    return pa.ListArray.from_arrays(bounds, inner)


def make_rows(batch: Any, index: list[int], encode: Encode, features: Features) -> pa.Table:
    """Make prepared rows of a batch of a dataset, whose rows have the numbers `index`.

    `encode` gives the values of `features` of each, and as `source` which of the examples it is of.
    """
    is_collecting = gc.isenabled()
    # Rows are in no cycles, but so many new objects would have Python look for some among all
    # that the imported libraries hold, for a third of the time of preparing 2,000 rows.
    gc.disable()
    try:
        return _table(batch, index, encode, features)  # by then they are gone
    finally:
        if is_collecting:
            gc.enable()


def _table(batch: Any, index: list[int], encode: Encode, features: Features) -> pa.Table:
    if isinstance(batch, pa.Table):
        examples = batch.to_pylist()
    else:  # of a transform
        examples = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    found = _encoded(examples, index, encode)
    values = list(zip(*found, strict=True)) or [()] * len(features)
    columns: dict[str, Any] = dict(zip(features, values, strict=True))
    columns["source"] = [index[i] for i in columns["source"]]
    return pa.table({name: column(columns[name], feature) for name, feature in features.items()})


def _encoded(examples: list[Example], index: list[int], encode: Encode) -> Encoded:
    """Encode examples; an error names the row of the dataset that has it alone."""
    try:
        return encode(examples)
    except Exception:
        for place, example in zip(index, examples, strict=True):
            try:
                encode([example])
            except Exception as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                words = error if isinstance(error, (TypeError, ValueError)) else repr(error)
                raise kind(f"Row {place} of the dataset: {words}") from error
        raise


def prepared(
    dataset: D, encode: Encode, features: Features, key: Sequence[Any], num_proc: int | None = None
) -> D:
    """Encode all rows of a dataset.

    The result of an equal call is read from the cache of `datasets`; a stream is encoded while
    it is read. `key` is everything that rows depend on besides the dataset; None for `num_proc`
    chooses by rows and cores.
    """
    options: dict[str, Any] = {"with_indices": True, "batched": True, "batch_size": BATCH}
    options |= {"features": features, "fn_kwargs": {"encode": encode, "features": features}}
    if isinstance(dataset, Dataset):
        options |= {
            "remove_columns": dataset.column_names,
            "new_fingerprint": update_fingerprint(dataset._fingerprint, VERSION, {"key": key}),
            "num_proc": num_proc or default_processes(len(dataset)),
            "desc": "Tokenizing",
        }
    return readable(dataset).map(make_rows, **options).with_format(None)


def readable(dataset: D) -> D:
    """A dataset that gives Arrow tables, which are quick, or what its transform makes of rows."""
    is_transformed = isinstance(dataset, Dataset) and dataset.format["type"] == "custom"
    return dataset if is_transformed else dataset.with_format("arrow")


def first_row(dataset: Dataset | IterableDataset) -> dict[str, Any]:
    """The row that decides what the examples of a dataset are; a ValueError if there is none."""
    if (found := next(iter(dataset), None)) is None:
        raise ValueError("The dataset has no rows.")
    return found


def default_processes(rows: int) -> int | None:
    """Processes that are worth starting for so many rows; None for this one alone."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = min(cores or 1, rows // ROWS_PER_PROCESS)
    return count if count > 1 else None


def prepare_supervised(
    dataset: D, encoder: TextEncoder, options: SupervisedOptions, num_proc: int | None = None
) -> D:
    """Encode a dataset for supervised fine-tuning, in full length; its first row says its kind.

    Returns:
        Columns `input_ids`, `trained` (which of them are in the loss), `source` (row of the
        dataset), `merged` (tokens over the edge of the trained part) and `origin` (what
        `source_column` says). A stream gives them while it is read.

    Raises:
        ValueError: if the dataset is empty, or its rows cannot be read.
    """
    kind = options.kind(first_row(dataset))
    key = [kind, encoder.digest, vars(options)]
    encode = partial(encode_supervised, kind=kind, encoder=encoder, options=options)
    return prepared(dataset, encode, SUPERVISED, key, num_proc)


@dataclass(frozen=True)
class CutReport:
    """What became of the rows of a dataset when they were cut to length."""

    rows: int
    long: int  # rows over a limit
    tokens_lost: int
    trained_lost: int  # of these, what would have been trained on
    untrained: tuple[int, ...]  # rows of the dataset left with nothing to train on
    merged: int  # rows with a token over the edge of what is trained

    def lines(self, limits: str) -> list[str]:
        """Say it in sentences; none if there is nothing to say."""
        rows, gone = count(self.rows, "row"), self.untrained
        named = ", ".join(map(str, gone[:3])) + ", ..." * (len(gone) > 3)
        lost = f"{count(self.tokens_lost, 'token')} left out, {self.trained_lost:,} of them trained"
        said = {
            f"{self.long:,} of {rows} longer than {limits}: {lost}.": self.long,
            f"{len(gone):,} of {rows} left with nothing to train on: {named}.": gone,
            f"{self.merged:,} of {rows} with a token that stands for characters of both the prompt "
            "and what is trained on; it is trained on.": self.merged,
        }
        return [line for line, number in said.items() if number]

    def warn(self, limits: str) -> None:
        """Log it."""
        for line in self.lines(limits):
            logger.warning(line)


def cut_supervised(
    table: Dataset, max_length: int | None = None, long_rows: str = "cut"
) -> tuple[np.ndarray, CutReport]:
    """Cut rows as `SupervisedDataset` does: row, start and stop (documents, 3), and what it costs.

    Only pieces with something to train on are kept.
    """
    whole, source = row_lengths(table, "input_ids"), np.asarray(table["source"][:])
    found = pieces(whole, max_length, long_rows, source)
    trained, full = trained_in(table, *found), trained_in(table, *whole_rows(whole))
    kept = np.stack(found, axis=1)[trained > 0]
    over = np.zeros(len(whole), dtype=bool) if max_length is None else whole > max_length
    untrained = ~np.isin(np.arange(len(whole)), kept[:, 0])
    if long_rows == "drop":
        untrained &= ~over
    elif long_rows == "wrapped_across":
        untrained = full == 0
    return kept, CutReport(
        rows=len(whole),
        long=int(over.sum()),
        tokens_lost=int(whole.sum() - (kept[:, 2] - kept[:, 1]).sum()),
        trained_lost=max(int(full.sum() - trained.sum()), 0),
        untrained=tuple(source[untrained].tolist()),
        merged=int((np.asarray(table["merged"][:]) > 0).sum()),
    )


class SupervisedDataset:
    """Prepared documents, cut to length; tokens stay on disk until they are asked for.

    Of rows over `max_length`, "cut" and "keep_start" keep the first tokens, "keep_end" the last
    ones, "drop" leaves them out, "split" makes several documents, "error" refuses them. "wrapped"
    lays all rows end to end and cuts every `max_length` tokens and at their ends; "wrapped_across"
    cuts every `max_length` tokens alone.

    Attributes:
        lengths: (documents,) tokens.
        rows (`Dataset`): as given.
        report (`CutReport`): counts.

    Raises:
        ValueError: if no row is left, or at a long one with `long_rows="error"`.
    """

    def __init__(self, table: Dataset, max_length: int | None = None, long_rows: str = "cut"):
        self.rows, self._table = table, table.with_format("numpy")
        self._pieces, self.report = cut_supervised(table, max_length, long_rows)
        self._bounds = np.concatenate([[0], np.cumsum(row_lengths(table, "input_ids"))])
        self.lengths = self._pieces[:, 2] - self._pieces[:, 1]
        if not len(self.lengths):
            raise ValueError(
                f"None of the {len(table)} rows has a token to train on"
                + (f" with max_length={max_length}." if max_length else ".")
                + " Raise max_length, or look at the masks of the dataset."
            )
        self.report.warn(f"max_length={max_length} (long_rows={long_rows!r})")

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, place: int) -> Document:
        at = place if place >= 0 else ~place  # see `share_of_rank`
        row, start, stop = self._pieces[at].tolist()
        end = int(np.searchsorted(self._bounds, self._bounds[row] + stop))
        found = document(self._table[row:end], start, stop)
        return found if place >= 0 else uncounted(found)


def count_loss(row: dict[str, Any], kept: int, losses: Counter[str]) -> None:
    """Count a prepared row of which only `kept` tokens are used, and log the first one."""
    parts = [row["input_ids"]] if "input_ids" in row else [row["prompt_ids"], *row["answers_ids"]]
    if kept < sum(map(len, parts)):
        fate = CUT if kept else LEFT_OUT
        losses[fate] += 1
        if losses[fate] == 1:
            logger.warning(f"Row {row['source']} {fate}; so are others like it.")


class LazySupervisedDataset:
    """Documents that are encoded when they are asked for, a micro-batch at a time."""

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
        self._readable = readable(dataset)
        kind = options.kind(first_row(dataset))
        self._encode = partial(encode_supervised, kind=kind, encoder=encoder, options=options)
        self._limits, self._losses = (max_length, long_rows), Counter[str]()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, places: list[int]) -> list[Document]:
        """The documents of some rows that have a token to train on, or one that does not count."""
        at = [place if place >= 0 else ~place for place in places]
        found: list[Document] = []
        for row in make_rows(self._readable[at], at, self._encode, SUPERVISED).to_pylist():
            some = documents(row, *self._limits)
            count_loss(row, sum(len(one.ids) for one in some), self._losses)
            found += some
        if not found or places[0] < 0:
            return [Document.filler(at[0])]
        return found


def document(rows: dict[str, Any], start: int = 0, stop: int | None = None) -> Document:
    """Make a document of a piece of prepared rows (columns), laid end to end."""
    ids = np.concatenate(rows["input_ids"])[start:stop].astype(np.int32)
    trained = np.concatenate(rows["trained"])[start:stop].astype(bool)
    trained[:1] = False
    source, origin = int(rows["source"][0]), str(rows["origin"][0])
    return Document(ids=ids, trained=trained, source=source, origin=origin)


def documents(row: dict[str, Any], max_length: int | None, long_rows: str) -> list[Document]:
    """Make the documents of one prepared row that have a token to train on.

    As `SupervisedDataset` does of all, but "wrapped" is "split" here.
    """
    how = "split" if "wrapped" in long_rows else long_rows
    whole, source = np.array([len(row["input_ids"])]), np.array([row["source"]])
    _, starts, stops = pieces(whole, max_length, how, source)
    pairs, columns = zip(starts, stops, strict=True), {name: [x] for name, x in row.items()}
    found = [document(columns, start, stop) for start, stop in pairs]
    return [one for one in found if one.trained.any()]


def pieces(
    whole: np.ndarray, size: int | None, long_rows: str, source: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut rows of `whole` tokens to length: row, first token and end of each piece."""
    if size is None:
        return whole_rows(whole)
    if long_rows == "split":
        return windows(whole, size)
    if "wrapped" in long_rows:
        return wrapped(whole, size, across=long_rows == "wrapped_across")
    over = whole > size
    if long_rows == "error" and over.any():
        named = ", ".join(map(str, source[over][:3]))
        raise ValueError(
            f"More than max_length={size} tokens in {over.sum():,} of {count(len(whole), 'row')}, "
            f"among them {named}. Raise max_length, or choose long_rows='cut', 'drop' or 'split'."
        )
    rows = np.flatnonzero(~over) if long_rows == "drop" else np.arange(len(whole))
    length = np.minimum(whole[rows], size)
    start = whole[rows] - length if long_rows == "keep_end" else np.zeros_like(length)
    return rows, start, start + length


def row_lengths(table: Dataset, column: str) -> np.ndarray:
    """Items of each list of a column, (rows,) int64."""
    return items(list_column(table, column))


def trained_in(
    table: Dataset, row: np.ndarray, start: np.ndarray, stop: np.ndarray, first: int = 1
) -> np.ndarray:
    """Count the trained tokens of pieces, (pieces,), but for the `first` ones of each."""
    masks = list_column(table, "trained")
    ends, flat = np.cumsum(items(masks)), np.append(pc.list_flatten(masks).to_numpy(), False)
    begin = np.where(row > 0, ends[row - 1], 0)
    edges = np.stack([begin + start + first, begin + stop], axis=1)
    edges[:, 0] = np.minimum(edges[:, 0], len(flat) - 1)
    # Sums from each edge to the next one, of which every other belongs to a piece.
    sums = np.add.reduceat(flat, edges.ravel(), dtype=np.int64)[::2]
    return np.where(start + first < stop, sums, 0)


def whole_rows(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows as a whole, as `pieces` describes them."""
    return np.arange(len(lengths)), np.zeros_like(lengths), lengths


def list_column(table: Dataset, column: str) -> pa.ChunkedArray:
    """All rows of a column of lists, in chunks: one array holds no more than 2**31 items."""
    found = table.data.column(column)
    return found if table._indices is None else found.take(table._indices.column(0))


def items(lists: pa.ChunkedArray) -> np.ndarray:
    """Count the items of each list, (rows,) int64."""
    return pc.list_value_length(lists).to_numpy().astype(np.int64)
