"""What a model can read: which ids, and how many tokens of a row."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from .arrow_lists import arrow_column, numbers

# Columns of token ids that a model reads.
TOKEN_COLUMNS = (
    "input_ids",
    "prompt_ids",
    "chosen_ids",
    "rejected_ids",
    "completion_ids",
    "kl_completion_ids",
    "answers_ids",
)


@dataclass(frozen=True)
class RowsBeyondContext:
    """Rows that are longer than what a model was made for."""

    count: int
    first: int  # row of the dataset
    longest: int  # tokens
    context: int  # tokens

    def __str__(self) -> str:
        return (
            f"are longer than the {self.context:,} tokens that the model sees "
            f"(max_position_embeddings): first row {self.first}, at most {self.longest:,} tokens. "
            f"To cut them, set max_length={self.context}"
        )


@dataclass(frozen=True)
class ModelBounds:
    """Ids below `vocabulary`, and rows of at most `context` tokens; None: unknown, or no limit."""

    vocabulary: int | None = None
    context: int | None = None

    def problem_of_id(self, largest: int) -> str | None:
        """Say what is wrong with the largest token id of a row, if something is."""
        if self.vocabulary is None or largest < self.vocabulary:
            return None
        return (
            f"has the token id {largest}, but the vocabulary of the model has {self.vocabulary:,} "
            f"tokens (ids 0 to {self.vocabulary - 1}). Use the tokenizer of this model, or call "
            "model.resize_token_embeddings(len(tokenizer)) before training"
        )

    def check_ids(self, dataset: Dataset) -> None:
        """Raise a ValueError that names the first prepared row with an id that is none."""
        if self.vocabulary is None:
            return
        names = [name for name in TOKEN_COLUMNS if name in dataset.column_names]
        columns = [arrow_column(dataset, name) for name in names]
        rows = [first_row_with(column, self.vocabulary) for column in columns]
        first = min((row for row in rows if row is not None), default=None)
        if first is not None:
            source = numbers(dataset, "source")[first]
            largest = max(largest_id(column.slice(first, 1)) for column in columns)
            raise ValueError(f"Row {source} of the dataset {self.problem_of_id(largest)}.")

    def rows_beyond(self, lengths: np.ndarray, sources: np.ndarray) -> RowsBeyondContext | None:
        """The rows longer than the context, of items with so many tokens made from `sources`."""
        if self.context is None or not (lengths > self.context).any():
            return None
        rows = np.unique(sources[lengths > self.context])
        return RowsBeyondContext(len(rows), int(rows[0]), int(lengths.max()), self.context)


def largest_id(lists: pa.ChunkedArray | pa.Array) -> int:
    """The largest id in lists of ids, or in lists of those; -1 if there is none."""
    ids = pc.list_flatten(lists)
    if pa.types.is_list(ids.type):
        ids = pc.list_flatten(ids)
    largest = pc.max(ids).as_py()
    return -1 if largest is None else int(largest)


def first_row_with(lists: pa.ChunkedArray, vocabulary: int) -> int | None:
    """The first row with an id of `vocabulary` or more; a chunk is read at a time."""
    start = 0
    for chunk in lists.chunks:
        if largest_id(chunk) >= vocabulary:
            largest = [largest_id(chunk[row : row + 1]) for row in range(len(chunk))]
            return start + next(row for row, value in enumerate(largest) if value >= vocabulary)
        start += len(chunk)
    return None
