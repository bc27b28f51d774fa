"""What a model can read: which ids, and how many tokens of a row."""

from dataclasses import dataclass

import numpy as np
from datasets import Dataset


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

    def check_ids(self, table: Dataset) -> None:
        """Raise a ValueError that names the first prepared row with an id that is none."""
        largest = np.asarray(table["largest_id"][:])
        for row in np.flatnonzero(largest >= (self.vocabulary or np.inf))[:1].tolist():
            source = table["source"][row]
            raise ValueError(
                f"Row {source} of the dataset {self.problem_of_id(int(largest[row]))}."
            )

    def rows_beyond(self, lengths: np.ndarray, sources: np.ndarray) -> RowsBeyondContext | None:
        """The rows longer than the context, of items with so many tokens made from `sources`."""
        if self.context is None or not (lengths > self.context).any():
            return None
        rows = np.unique(sources[lengths > self.context])
        return RowsBeyondContext(len(rows), int(rows[0]), int(lengths.max()), self.context)
