"""Preparing a dataset once: encoded over several processes, cached, and cut to length."""

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.fingerprint import update_fingerprint
from transformers.utils import logging

from ..number_format import pluralize
from .bounds import ModelBounds, RowsBeyondContext
from .conversations import warn_of_repeated_prompt
from .encode import TextEncoder
from .formats import Row, refuse_media_columns
from .json_columns import json_decoder, to_rows
from .packing import pieces
from .rows import Document
from .supervised import SupervisedOptions, encode_supervised

logger = logging.get_logger(__name__)

# Changed with everything that changes what a prepared row holds.
VERSION = 7
BATCH = 1000
# What may become of rows.
LONG, UNTRAINED = "over a length limit", "left out, with nothing left to train on"
BEYOND = "longer than what the model sees (max_position_embeddings; max_length cuts rows)"
MERGED = "with a token that stands for characters of both the prompt and what is trained on"
COUNTED_AT_ONCE = 2**18  # tokens
ROWS_PER_PROCESS = 10_000  # fewer are done before another process has started
SUPERVISED = Features(
    input_ids=List(Value("int32")),
    trained=List(Value("bool")),  # whether they are in the loss
    source=Value("int64"),  # row of the dataset
    merged=Value("int32"),  # tokens over the edge of the trained part
    origin=Value("string"),  # what `source_column` says
    largest_id=Value("int32"),  # added by `make_rows`
)
NO_BOUNDS = ModelBounds()
D = TypeVar("D", Dataset, IterableDataset)
Encoded = Sequence[tuple[Any, ...]]  # values by row
Encode = Callable[[list[Row]], Encoded]


def make_rows(batch: Any, index: list[int], encode: Encode, features: Features) -> pa.Table:
    """Make prepared rows of a batch of a dataset, whose rows have the numbers `index`.

    `encode` gives the values of `features` of each, but for the `largest_id`, which is the last,
    and as `source` which of the examples it is of.
    """
    is_collecting = gc.isenabled()
    # Rows are in no cycles, but so many new objects would have Python look for some among all
    # that the imported libraries hold, for a third of the time of preparing 2,000 rows.
    gc.disable()
    try:
        if isinstance(batch, pa.Table):
            examples = to_rows(batch)
        else:  # of a transform
            rows = zip(*batch.values(), strict=True)
            examples = [dict(zip(batch, row, strict=True)) for row in rows]
        encoded = _encoded(examples, index, encode)
        names = [name for name in features if name != "largest_id"]
        columns = {name: [row[i] for row in encoded] for i, name in enumerate(names)}
        columns["source"] = [index[i] for i in columns["source"]]
        columns["largest_id"] = [max(ids, default=-1) for ids in _all_ids(columns)]
        return pa.table(columns, schema=features.arrow_schema)
    finally:
        if is_collecting:
            gc.enable()


def _all_ids(columns: dict[str, list[Any]]) -> Iterator[Iterable[int]]:
    """All token ids of each prepared row."""
    if "input_ids" in columns:
        return iter(columns["input_ids"])
    rows = zip(columns["prompt_ids"], columns["answers_ids"], strict=True)
    return (chain(prompt, *answers) for prompt, answers in rows)


def _encoded(examples: list[Row], index: list[int], encode: Encode) -> Encoded:
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
    """Encode all rows of a dataset, or read the result of an equal call from its cache.

    A stream is encoded while it is read. `key` is everything that rows depend on besides the
    dataset; None for `num_proc` chooses by rows and cores.
    """
    options: dict[str, Any] = {"with_indices": True, "batched": True, "batch_size": BATCH}
    options |= {"features": features, "fn_kwargs": {"encode": encode, "features": features}}
    if isinstance(dataset, Dataset):
        options |= {
            "remove_columns": dataset.column_names,
            "new_fingerprint": fingerprint(dataset, VERSION, key),
            "num_proc": num_proc or default_processes(len(dataset)),
            "desc": "Tokenizing",
        }
    elif not has_fixed_types(dataset.features):
        options["remove_columns"] = dataset.column_names or [*first_row(dataset)]
        return dataset.map(make_columns, **options)
    return readable(dataset).map(make_rows, **options).with_format(None)


def fingerprint_of(dataset: Dataset) -> str:
    """The name of a dataset's contents in the cache, which `datasets` 4.7 to 5.2 keep private."""
    return dataset._fingerprint


def make_columns(batch: dict[str, list[Any]], index: list[int], **options: Any) -> dict[str, Any]:
    """`make_rows` for a stream whose types may differ from row to row, so not one of tables."""
    columns: dict[str, Any] = make_rows(batch, index, **options).to_pydict()
    return columns


def has_fixed_types(features: Features | None) -> bool:
    """Whether rows of these features fit in a table as they are: they are known, without JSON."""
    kinds = features.type if features is not None else pa.json_()
    return json_decoder(kinds) is None


def fingerprint(dataset: Dataset, version: Any, key: Any) -> str:
    """Name what a version of a function makes of a dataset; `key` is all else it depends on."""
    return str(update_fingerprint(fingerprint_of(dataset), version, {"key": key}))


def readable(dataset: D) -> D:
    """A dataset that gives Arrow tables, which are quick, or what its transform makes of rows."""
    is_transformed = isinstance(dataset, Dataset) and dataset.format["type"] == "custom"
    return dataset if is_transformed else dataset.with_format("arrow")


def first_row(dataset: Dataset | IterableDataset) -> Row:
    """The row that decides what the examples of a dataset are; a ValueError if there is none."""
    if (found := next(iter(dataset), None)) is None:
        raise ValueError("The dataset has no rows.")
    refuse_media_columns("The dataset", found)  # of a stream that did not say what it has
    return found


def default_processes(rows: int) -> int | None:
    """Processes that are worth starting for this many rows; None for this one alone."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = min(cores or 1, rows // ROWS_PER_PROCESS)
    return count if count > 1 else None


def prepare_supervised(
    dataset: D, encoder: TextEncoder, options: SupervisedOptions, num_proc: int | None = None
) -> D:
    """Encode a dataset for supervised fine-tuning, in full length; its first row says its kind.

    A stream is encoded while it is read. ValueError: it is empty, or its rows cannot be read.
    """
    example = first_row(dataset)
    kind = options.kind(example)
    if kind == "completion":
        warn_of_repeated_prompt(example, ["completion"])
    encode = partial(encode_supervised, kind=kind, encoder=encoder, options=options)
    return prepared(dataset, encode, SUPERVISED, [kind, encoder.digest, vars(options)], num_proc)


@dataclass(frozen=True)
class CutReport:
    """What became of rows when they were cut to length; those of the dataset by their numbers."""

    rows: int
    long: tuple[int, ...]  # over a limit
    tokens_lost: int
    trained_lost: int  # of these, what would have been trained on
    untrained: tuple[int, ...]  # left with nothing to train on
    merged: int  # rows with a token over the edge of what is trained
    beyond: RowsBeyondContext | None = None

    @classmethod
    def of(cls, table: Dataset, long: np.ndarray, untrained: np.ndarray, *lost: int) -> Self:
        """Name the rows that masks (rows,) mark; `lost` are tokens, and trained ones of these."""
        source, merged = (np.asarray(table[name][:]) for name in ("source", "merged"))
        named = [tuple(source[mask].tolist()) for mask in (long, untrained)]
        return cls(len(table), named[0], lost[0], lost[1], named[1], int((merged > 0).sum()))

    def lines(self, limits: str) -> list[str]:
        """The report in sentences; none if there is nothing to report."""
        rows, gone = pluralize(self.rows, "row"), self.untrained
        named = ", ".join(map(str, gone[:3])) + ", ..." * (len(gone) > 3)
        lost = pluralize(self.tokens_lost, "token")
        lost += f" left out, {self.trained_lost:,} of them trained"
        said = {
            f"{len(self.long):,} of {rows} longer than {limits}: {lost}.": self.long,
            f"{len(gone):,} of {rows} left with nothing to train on: {named}.": gone,
            f"{self.merged:,} of {rows} with a token that stands for characters of both the prompt "
            "and what is trained on; that token is trained on.": self.merged,
        }
        if self.beyond is not None:
            said[f"{self.beyond.count:,} of {rows} {self.beyond}."] = self.beyond.count
        return [line for line, number in said.items() if number]


class ItemDataset:
    """Items of prepared rows, cut to length, without those of which nothing is left to train on.

    Tokens stay on disk until they are asked for; `lengths` are (items,) tokens.
    """

    def __init__(self, rows: Dataset, lengths: np.ndarray, report: CutReport):
        self.rows, self.lengths, self.report = rows, lengths, report

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Any]:
        return map(self.item, range(len(self)))

    def item(self, at: int) -> Any:
        raise NotImplementedError

    def __getitem__(self, place: int) -> Any:
        """Make an item; a negative place gives one that does not count (see `share_of_rank`)."""
        return self.item(place) if place >= 0 else replace(self.item(~place), counts=False)

    def checked(self, limits: str, advice: str = "Check the masks of the dataset.") -> Self:
        """Say what was cut; having no item left is a ValueError.

        It has this advice, unless rows are over the `limits`.
        """
        if not len(self):
            if is_cut := bool(limits and self.report.long):
                advice = "Raise the limit, or check the masks of the dataset."
            rows = f"None of the {self.report.rows} rows" if self.report.rows else "No row"
            with_limits = f" with {limits}" * is_cut
            raise ValueError(f"{rows} has a token to train on{with_limits}. {advice}")
        for line in self.report.lines(limits):
            logger.warning(line)
        return self


class SupervisedDataset(ItemDataset):
    """Prepared documents.

    `long_rows` is as for `pieces`, but that "error" is a ValueError if a row is over `max_length`.
    So is an id that is not within the `bounds` of the model.
    """

    def __init__(
        self,
        table: Dataset,
        max_length: int | None = None,
        long_rows: str = "cut",
        bounds: ModelBounds = NO_BOUNDS,
    ):
        bounds.check_ids(table)
        self._source = np.asarray(table["source"][:])
        lengths = items(arrow_column(table, "input_ids"))
        over = lengths > (np.inf if max_length is None else max_length)
        if long_rows == "error" and over.any():
            named = ", ".join(map(str, self._source[over][:3]))
            raise ValueError(
                f"{over.sum():,} of {pluralize(len(table), 'row')} have more than max_length="
                f"{max_length} tokens, among them row {named}. Raise max_length, or choose "
                "long_rows='cut', 'drop' or 'split'."
            )
        starts, stops = pieces(lengths, max_length, long_rows)
        self.rows, self._ends = table, np.cumsum(lengths)
        flags = self._columns[1]
        trained = trained_in(flags, starts, stops)
        full = trained_in(flags, *pieces(lengths))
        self._starts, self._stops = starts[trained > 0], stops[trained > 0]
        kept = self._stops - self._starts
        rows = np.searchsorted(self._ends, self._starts, side="right")
        untrained = ~np.isin(np.arange(len(table)), rows)
        if long_rows == "drop":
            untrained &= ~over
        elif long_rows == "wrapped_across":
            untrained = full == 0
        lost = int(lengths.sum() - kept.sum()), max(int(full.sum() - trained.sum()), 0)
        report = CutReport.of(table, over, untrained, *lost)
        beyond = bounds.rows_beyond(kept, self._source[rows])
        super().__init__(table, kept, replace(report, beyond=beyond))

    @cached_property
    def _columns(self) -> list[pa.ChunkedArray]:
        tokens = [pc.list_flatten(arrow_column(self.rows, x)) for x in ("input_ids", "trained")]
        return [*tokens, arrow_column(self.rows, "origin")]

    def __getstate__(self) -> dict[str, Any]:
        """Workers that are not forked read the tokens from the disk, too."""
        return {name: value for name, value in vars(self).items() if name != "_columns"}

    def item(self, at: int) -> Document:
        """Make a document."""
        start, stop = int(self._starts[at]), int(self._stops[at])
        row = int(np.searchsorted(self._ends, start, side="right"))
        *tokens, origin = self._columns
        ids, trained = (np.array(x.slice(start, stop - start)) for x in tokens)
        trained[0] = False
        return Document.of(ids, trained, int(self._source[row]), origin=origin[row].as_py())


class LazySupervisedDataset:
    """Documents that are encoded when they are asked for, a micro-batch at a time."""

    def __init__(
        self, dataset: Dataset, encoder: TextEncoder, options: SupervisedOptions, **limits: Any
    ):
        self.rows, self._readable = dataset, readable(dataset)
        self.lengths = np.zeros(len(dataset), dtype=np.int64)  # nobody knows them before
        kind = options.kind(first_row(dataset))
        self._encode = partial(encode_supervised, kind=kind, encoder=encoder, options=options)
        self._cut, self._losses = partial(SupervisedDataset, **limits), Counter[str]()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, places: list[int]) -> list[Document]:
        """The documents of some rows that have a token to train on, or one that does not count."""
        found: list[Document] = []
        if places[0] >= 0:
            table = make_rows(self._readable[places], places, self._encode, SUPERVISED)
            found = list(items_of(table, self._cut, self._losses))
        ids, trained = np.zeros(2, dtype=np.int32), np.array([False, True])
        return found or [Document.of(ids, trained, max(places[0], ~places[0]), counts=False)]


def items_of(rows: pa.Table, cut: Callable[[Dataset], ItemDataset], losses: Counter[str]) -> Any:
    """Cut rows that are read bit by bit, count what is lost, and log the first of each kind."""
    found = cut(Dataset(rows, fingerprint=""))  # which would take longer than all else
    for fate, lost in {LONG: found.report.long, UNTRAINED: found.report.untrained}.items():
        if lost and not losses[fate]:
            logger.warning(f"Row {lost[0]} is {fate}; further ones are only counted.")
        losses[fate] += len(lost)
    if (beyond := found.report.beyond) is not None:
        if not losses[BEYOND]:
            logger.warning(f"Rows {beyond}. Further ones are only counted.")
        losses[BEYOND] += beyond.count
    losses[MERGED] += found.report.merged
    return found


def trained_in(
    flags: pa.ChunkedArray | np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> np.ndarray:
    """Count the tokens that `flags` (tokens,) marks in pieces, (pieces,), but for their first.

    Pieces are in order and do not overlap. Memory does not grow with the tokens: `COUNTED_AT_ONCE`
    of them are read at a time.
    """
    edges = np.stack([np.minimum(starts + 1, stops), stops], axis=1).ravel()
    marked_before = np.zeros(len(edges), dtype=np.int64)  # flags that are set in front of each edge
    total = 0
    for start in range(0, len(flags), COUNTED_AT_ONCE):
        chunk = np.asarray(flags[start : start + COUNTED_AT_ONCE])
        sums = np.cumsum(chunk, dtype=np.int64) + total
        first, last = np.searchsorted(edges, [start + 1, start + len(chunk) + 1])
        marked_before[first:last] = sums[edges[first:last] - start - 1]
        total = sums[-1]
    return marked_before[1::2] - marked_before[::2]


def arrow_column(table: Dataset, column: str) -> pa.ChunkedArray:
    """All rows of a column, in chunks: one array holds no more than 2**31 items of lists.

    After a selection or a shuffle, `_indices` of `datasets` 4.7 to 5.2 says which rows of the table
    are meant; what is public gathers them one by one, or copies all columns.
    """
    found = table.data.column(column)
    return found if table._indices is None else found.take(table._indices.column(0))


def items(lists: pa.ChunkedArray) -> np.ndarray:
    """Count the items of each list, (rows,) int64."""
    return pc.list_value_length(lists).to_numpy().astype(np.int64)
