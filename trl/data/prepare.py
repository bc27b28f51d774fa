"""Encoding a dataset once, over several processes, with the result kept in the cache."""

import gc
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.fingerprint import update_fingerprint

from .conversations import warn_of_repeated_prompt
from .encode import TextEncoder
from .examples import IGNORED
from .formats import Row, refuse_media_columns
from .json_columns import json_decoder, to_rows
from .supervised import EncodedDocument, SupervisedOptions, encode_supervised

# Changed with everything that changes what a prepared row holds.
VERSION = 8
BATCH = 1000
ROWS_PER_PROCESS = 10_000  # fewer are done before another process has started
SUPERVISED = Features(
    input_ids=List(Value("int32")),
    labels=List(Value("int32")),  # the ids that are in the loss, -100 for others
    source=Value("int64"),  # row of the dataset
    merged=Value("int32"),  # tokens that stand for characters on both sides of the loss's edge
    origin=Value("string"),  # the dataset of a mixture that the row is from, or ""
)
D = TypeVar("D", Dataset, IterableDataset)
ArrowColumns = dict[str, pa.Array]


class EncodedExample(Protocol):
    """What one example became, or a part of it."""

    @property
    def example(self) -> int:
        """Position of the example in its batch."""


E = TypeVar("E", bound=EncodedExample)
RawBatch: TypeAlias = pa.Table | dict[str, list[object]]


@dataclass(frozen=True)
class RowEncoder(Generic[E]):
    """Turns examples into prepared rows; an example may become several."""

    encode: Callable[[list[Row]], Sequence[E]]
    columns: Callable[[Sequence[E]], ArrowColumns]  # makes all of `features` but the source
    features: Features

    def encode_named(self, examples: list[Row], numbers: Sequence[int]) -> Sequence[E]:
        """Encode examples; an error names the row of the dataset that causes it."""
        try:
            return self.encode(examples)
        except Exception:
            for number, example in zip(numbers, examples, strict=True):
                try:
                    self.encode([example])
                except Exception as error:
                    is_ours = isinstance(error, (TypeError, ValueError))
                    error_class = TypeError if isinstance(error, TypeError) else ValueError
                    text = error if is_ours else repr(error)
                    raise error_class(f"Row {number} of the dataset: {text}") from error
            raise


def make_rows(batch: RawBatch, numbers: list[int], encoder: RowEncoder[E]) -> pa.Table:
    """Encode a batch of a dataset, whose rows have these numbers."""
    is_collecting = gc.isenabled()
    # Rows are in no cycles, but so many new objects make Python search everything that the imported
    # libraries hold: a third of the time of preparing 2,000 rows.
    gc.disable()
    try:
        if isinstance(batch, pa.Table):
            examples = to_rows(batch)
        else:  # of a transform
            rows = zip(*batch.values(), strict=True)
            examples = [dict(zip(batch, row, strict=True)) for row in rows]
        encoded = encoder.encode_named(examples, numbers)
        sources = [numbers[row.example] for row in encoded]
        columns = encoder.columns(encoded) | {"source": pa.array(sources, pa.int64())}
        schema = encoder.features.arrow_schema
        return pa.table({name: columns[name] for name in encoder.features}, schema=schema)
    finally:
        if is_collecting:
            gc.enable()


def id_lists(rows: Iterable[list[int]]) -> pa.ListArray:
    """Make an Arrow array of lists of token ids."""
    values = array("i")
    offsets = [0]
    for ids in rows:
        values.fromlist(list(ids))  # twice as fast as `extend`
        offsets.append(len(values))
    flat = pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat)


def document_columns(documents: Sequence[EncodedDocument]) -> ArrowColumns:
    """Write encoded documents down as columns."""
    input_ids = id_lists([document.input_ids for document in documents])
    flat_ids = input_ids.values.to_numpy()
    masks = [document.loss_mask for document in documents]
    in_loss = np.concatenate([np.zeros(0, dtype=bool), *masks])
    labels = pa.array(np.where(in_loss, flat_ids, np.int32(IGNORED)))
    return {
        "input_ids": input_ids,
        "labels": pa.ListArray.from_arrays(input_ids.offsets, labels),
        "merged": pa.array([document.merged for document in documents], pa.int32()),
        "origin": pa.array([document.origin for document in documents], pa.string()),
    }


def encode_dataset(
    dataset: D, encoder: RowEncoder[E], key: Sequence[object], num_proc: int | None = None
) -> D:
    """Encode all rows of a dataset, or read the result of an equal call from its cache.

    A stream is encoded while it is read. `key` is everything that rows depend on besides the
    dataset; None for `num_proc` chooses by rows and cores.
    """
    if isinstance(dataset, Dataset):
        prepared = readable(dataset).map(
            make_rows,
            with_indices=True,
            batched=True,
            batch_size=BATCH,
            features=encoder.features,
            fn_kwargs={"encoder": encoder},
            remove_columns=dataset.column_names,
            new_fingerprint=fingerprint(dataset, VERSION, key),
            num_proc=num_proc or default_processes(len(dataset)),
            desc="Tokenizing",
        )
        return prepared.with_format(None)
    is_typed = has_fixed_types(dataset.features)
    # Tables drop the columns that the function does not return by themselves.
    removed = None if is_typed else dataset.column_names or [*first_row(dataset)]
    source = dataset.with_format("arrow") if is_typed else dataset
    return source.map(
        make_rows if is_typed else make_columns,
        with_indices=True,
        batched=True,
        batch_size=BATCH,
        features=encoder.features,
        fn_kwargs={"encoder": encoder},
        remove_columns=removed,
    ).with_format(None)


def make_columns(
    batch: RawBatch, numbers: list[int], encoder: RowEncoder[E]
) -> dict[str, list[object]]:
    """`make_rows` for a stream that cannot give tables, since types differ from row to row."""
    columns: dict[str, list[object]] = make_rows(batch, numbers, encoder).to_pydict()
    return columns


def has_fixed_types(features: Features | None) -> bool:
    """Whether rows of these features fit in a table as they are: they are known, without JSON."""
    return features is not None and json_decoder(features.type) is None


def fingerprint_of(dataset: Dataset) -> str:
    """The name of a dataset's contents in the cache, which `datasets` 4.7 to 5.2 keep private."""
    return dataset._fingerprint


def fingerprint(dataset: Dataset, version: object, key: object) -> str:
    """Name what a version of a function makes of a dataset; `key` is all else it depends on."""
    return str(update_fingerprint(fingerprint_of(dataset), version, {"key": key}))


def readable(dataset: Dataset) -> Dataset:
    """A dataset that gives Arrow tables, which are quick, or what its transform makes of rows."""
    is_transformed = dataset.format["type"] == "custom"
    return dataset if is_transformed else dataset.with_format("arrow")


def first_row(dataset: Dataset | IterableDataset) -> Row:
    """The row that decides what the examples of a dataset are; a ValueError if there is none."""
    row: Row | None = next(iter(dataset), None)
    if row is None:
        raise ValueError("The dataset has no rows.")
    refuse_media_columns("The dataset", row)  # of a stream that did not say what it has
    return row


def default_processes(rows: int) -> int | None:
    """Processes that are worth starting for this many rows; None for this one alone."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = min(cores or 1, rows // ROWS_PER_PROCESS)
    return count if count > 1 else None


def is_prepared(dataset: Dataset | IterableDataset, features: Features) -> bool:
    """Whether a dataset has the columns of these features, so nothing is left to encode."""
    return set(features) <= set(dataset.column_names or ())


def supervised_encoder(
    example: Row, encoder: TextEncoder, options: SupervisedOptions
) -> RowEncoder[EncodedDocument]:
    """Return what encodes examples of the kind of this one, for supervised fine-tuning."""
    encode = partial(
        encode_supervised, example_kind=options.kind(example), encoder=encoder, options=options
    )
    return RowEncoder(encode, document_columns, SUPERVISED)


def prepare_supervised(
    dataset: D, encoder: TextEncoder, options: SupervisedOptions, num_proc: int | None = None
) -> D:
    """Encode a dataset for supervised fine-tuning, in full length; its first row says its kind.

    A dataset that is prepared is returned. A stream is encoded while it is read. ValueError: it is
    empty, or its rows cannot be read.
    """
    example = first_row(dataset)
    if is_prepared(dataset, SUPERVISED):
        return dataset
    example_kind = options.kind(example)
    if example_kind == "completion":
        warn_of_repeated_prompt(example, ["completion"])
    rows = supervised_encoder(example, encoder, options)
    return encode_dataset(dataset, rows, [example_kind, encoder.digest, vars(options)], num_proc)
