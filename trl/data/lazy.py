"""Documents that are encoded when they are read."""

import pyarrow as pa
from datasets import Dataset
from datasets.table import InMemoryTable

from .cutting import CutCounter, DocumentLimits, cut_documents
from .encode import TextEncoder
from .examples import IGNORED, Example
from .prepare import (
    SUPERVISED,
    VERSION,
    fingerprint,
    first_row,
    make_rows,
    readable,
    supervised_encoder,
)
from .supervised import SupervisedOptions

Columns = dict[str, list[object]]


class LazyDocuments:
    """Encodes and cuts the rows whose numbers are in `source`: the transform of a lazy dataset."""

    def __init__(
        self,
        raw: Dataset,
        encoder: TextEncoder,
        options: SupervisedOptions,
        limits: DocumentLimits,
    ):
        self.raw = raw
        self._readable = readable(raw)
        self._encoder = supervised_encoder(first_row(raw), encoder, options)
        self._limits = limits
        self._losses = CutCounter()

    def __call__(self, batch: Columns) -> Columns:
        """Return the columns of a prepared dataset, of documents with a token to train on.

        There is always one: where nothing is left, one that is not in the loss.
        """
        if None not in batch["input_ids"]:  # rows that `map` has written
            return batch
        numbers = [int(str(number)) for number in batch["source"]]
        table = make_rows(self._readable[numbers], numbers, self._encoder)
        cut = cut_documents(Dataset(table, fingerprint=""), self._limits)
        self._losses.add(cut.report)
        examples = cut.examples() or [untrained(numbers[0])]
        columns: Columns = {
            name: [dict(example)[name] for example in examples] for name in SUPERVISED
        }
        rows = [numbers.index(example["source"]) for example in examples]
        for name in batch.keys() - columns.keys():  # that `map` has added
            columns[name] = [batch[name][row] for row in rows]
        return columns

    def __deepcopy__(self, memo: object) -> "LazyDocuments":
        return self  # datasets copies the transform with each selection


def untrained(source: int) -> Example:
    """A document without a token in the loss."""
    return Example(input_ids=[0, 0], labels=[IGNORED, IGNORED], source=source, merged=0, origin="")


def lazy_documents(
    dataset: Dataset, encoder: TextEncoder, options: SupervisedOptions, limits: DocumentLimits
) -> Dataset:
    """A dataset whose rows are encoded and cut when they are read, a batch at a time."""
    transform = LazyDocuments(dataset, encoder, options, limits)
    count = len(dataset)
    columns = {field.name: pa.nulls(count, field.type) for field in SUPERVISED.arrow_schema}
    columns["source"] = pa.array(range(count), pa.int64())
    table = pa.table(columns, schema=SUPERVISED.arrow_schema)
    key = [encoder.digest, vars(options), limits]
    name = fingerprint(dataset, ("lazy", VERSION), key)
    return Dataset(InMemoryTable(table), fingerprint=name).with_transform(transform)


def is_lazy(dataset: Dataset) -> bool:
    """Whether rows are encoded when they are read."""
    return isinstance(dataset.format["format_kwargs"].get("transform"), LazyDocuments)


def raw_rows(dataset: Dataset) -> Dataset:
    """The dataset that a lazy one encodes; any other one itself."""
    transform = dataset.format["format_kwargs"].get("transform")
    return transform.raw if isinstance(transform, LazyDocuments) else dataset
