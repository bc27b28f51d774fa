"""Cutting prepared rows to length, and reporting what was lost."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers.utils import logging

from ..number_format import pluralize
from .arrow_lists import (
    Ranges,
    arrow_column,
    count_in_ranges,
    cut_dataset,
    cut_table,
    numbers,
    row_lengths,
)
from .bounds import ModelBounds, RowsBeyondContext
from .examples import IGNORED, Example, to_examples
from .packing import pieces
from .prepare import fingerprint

logger = logging.get_logger(__name__)

VERSION = 1  # changed with everything that changes how rows are cut
# What may happen to rows.
LONG = "over a length limit"
UNTRAINED = "left out, with nothing left to train on"
BEYOND = "longer than what the model sees (max_position_embeddings; max_length cuts rows)"
MERGED = "with a token that stands for characters of both the prompt and what is trained on"
NO_BOUNDS = ModelBounds()


@dataclass(frozen=True)
class CutReport:
    """What happened to rows when they were cut to length; those of the dataset by their numbers."""

    rows: int
    long: tuple[int, ...]  # over a limit
    tokens_lost: int
    trained_lost: int  # of these, what would have been trained on
    untrained: tuple[int, ...]  # left with nothing to train on
    merged: int  # rows with a token over the edge of what is trained
    beyond: RowsBeyondContext | None = None

    @classmethod
    def of(
        cls,
        dataset: Dataset,
        long: np.ndarray,
        untrained: np.ndarray,
        tokens_lost: int,
        trained_lost: int,
        beyond: RowsBeyondContext | None,
    ) -> Self:
        """Make a report; masks (rows,) mark rows that are long, and left with nothing."""
        sources = numbers(dataset, "source")
        return cls(
            rows=len(dataset),
            long=tuple(sources[long].tolist()),
            tokens_lost=tokens_lost,
            trained_lost=trained_lost,
            untrained=tuple(sources[untrained].tolist()),
            merged=int((numbers(dataset, "merged") > 0).sum()),
            beyond=beyond,
        )

    def lines(self, limits: str) -> list[str]:
        """The report in sentences; none if there is nothing to report."""
        rows = pluralize(self.rows, "row")
        lines = []
        if self.long:
            lost = f"{pluralize(self.tokens_lost, 'token')} left out"
            trained = f"{self.trained_lost:,} of them trained"
            lines.append(f"{len(self.long):,} of {rows} longer than {limits}: {lost}, {trained}.")
        if self.untrained:
            named = ", ".join(map(str, self.untrained[:3]))
            if len(self.untrained) > 3:
                named += ", ..."
            count = f"{len(self.untrained):,} of {rows}"
            lines.append(f"{count} left with nothing to train on: {named}.")
        if self.merged:
            lines.append(f"{self.merged:,} of {rows} {MERGED}; that token is trained on.")
        if self.beyond is not None:
            lines.append(f"{self.beyond.count:,} of {rows} {self.beyond}.")
        return lines


@dataclass(eq=False)
class Cut:
    """Prepared rows, and which ranges of their lists are left after cutting."""

    prepared: Dataset  # in full length
    rows: np.ndarray  # (R,) rows of `prepared` that are left, in order
    # (R,) by column. Empty: nothing was cut. None: ranked answers, whose lists cannot be cut.
    ranges: Mapping[str, Ranges] | None
    report: CutReport
    key: object  # all that the cut depends on besides the prepared rows

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the documents that are left (R,)."""
        if self.ranges:
            return self.ranges["input_ids"].sizes
        return row_lengths(self.prepared, "input_ids")[self.rows]

    @cached_property
    def dataset(self) -> Dataset:
        """The rows that are left, cut, without those of which nothing is left to train on.

        Tokens stay where they are: on disk, if the prepared rows are there.
        """
        if ranges := self._column_ranges():
            name = fingerprint(self.prepared, ("cut", VERSION), self.key)
            return cut_dataset(self.prepared, ranges, self.rows, name)
        if len(self.rows) == len(self.prepared):
            return self.prepared
        return self.prepared.select(self.rows)

    def examples(self) -> list[Example]:
        """The rows that are left, for a few that are in memory."""
        if ranges := self._column_ranges():
            return to_examples(cut_table(self.prepared, ranges, self.rows))[::2]
        names = self.prepared.column_names
        table = pa.table({name: arrow_column(self.prepared, name) for name in names})
        return to_examples(table.take(pa.array(self.rows)))

    def _column_ranges(self) -> Mapping[str, Ranges]:
        if self.ranges is None:
            raise NotImplementedError("Ranked answers can be left out if they are long, not cut.")
        return self.ranges

    def checked(self, limits: str, advice: str = "Check the masks of the dataset.") -> Dataset:
        """Log what was cut, and return the dataset; a ValueError if no row is left.

        It ends with this advice, unless rows are over the `limits`.
        """
        if not len(self):
            with_limits = ""
            if limits and self.report.long:
                with_limits = f" with {limits}"
                advice = "Raise the limit, or check the masks of the dataset."
            rows = f"None of the {self.report.rows} rows" if self.report.rows else "No row"
            raise ValueError(f"{rows} has a token to train on{with_limits}. {advice}")
        for line in self.report.lines(limits):
            logger.warning(line)
        return self.dataset


@dataclass(frozen=True, kw_only=True)
class DocumentLimits:
    """How long documents may be. `long_rows` is as for `pieces`, or "error" to refuse long ones.

    A document with an id that is not within the `bounds` of the model is refused, too.
    """

    max_length: int | None = None
    long_rows: str = "cut"
    bounds: ModelBounds = NO_BOUNDS

    def check_none_is_long(self, prepared: Dataset, is_long: np.ndarray) -> None:
        """Raise a ValueError that names the first rows (rows,) bool that are too long."""
        if not is_long.any():
            return
        named = ", ".join(map(str, numbers(prepared, "source")[is_long][:3]))
        raise ValueError(
            f"{is_long.sum():,} of {pluralize(len(prepared), 'row')} have more than max_length="
            f"{self.max_length} tokens, among them row {named}. Raise max_length, or choose "
            "long_rows='cut', 'drop' or 'split'."
        )


def is_target(labels: np.ndarray) -> np.ndarray:
    """Which labels are in the loss."""
    return labels != IGNORED


def cut_documents(prepared: Dataset, limits: DocumentLimits | None = None) -> Cut:
    """Cut prepared documents, and leave out those without a token to train on."""
    limits = limits or DocumentLimits()
    limits.bounds.check_ids(prepared)
    lengths = row_lengths(prepared, "input_ids")
    is_long = lengths > (np.inf if limits.max_length is None else limits.max_length)
    if limits.long_rows == "error":
        limits.check_none_is_long(prepared, is_long)

    labels = pc.list_flatten(arrow_column(prepared, "labels"))
    all_starts, all_stops = pieces(lengths)
    targets_of_rows = count_in_ranges(labels, is_target, all_starts, all_stops)
    is_cut = limits.long_rows == "wrapped_across" or bool(is_long.any())
    if is_cut:
        starts, stops = pieces(lengths, limits.max_length, limits.long_rows)
        targets = count_in_ranges(labels, is_target, starts, stops)
    else:
        starts = all_starts
        stops = all_stops
        targets = targets_of_rows
    ranges = Ranges(starts[targets > 0], stops[targets > 0])
    rows = np.searchsorted(all_stops, ranges.starts, side="right")

    is_untrained = ~np.isin(np.arange(len(prepared)), rows)
    if limits.long_rows == "drop":
        is_untrained &= ~is_long
    elif limits.long_rows == "wrapped_across":
        is_untrained = targets_of_rows == 0
    report = CutReport.of(
        prepared,
        long=is_long,
        untrained=is_untrained,
        tokens_lost=int(lengths.sum() - ranges.sizes.sum()),
        trained_lost=max(int(targets_of_rows.sum() - targets.sum()), 0),
        beyond=limits.bounds.rows_beyond(ranges.sizes, numbers(prepared, "source")[rows]),
    )
    by_column = {"input_ids": ranges, "labels": ranges} if is_cut else {}
    return Cut(prepared, rows, by_column, report, [limits.max_length, limits.long_rows])


class CutCounter:
    """Counts what cutting loses of rows that are read a few at a time, and logs the first of each.

    `log_totals` says how many there were.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, report: CutReport) -> None:
        """Count what a report names."""
        self._add_rows(LONG, report.long)
        self._add_rows(UNTRAINED, report.untrained)
        if report.beyond is not None:
            if not self._counts[BEYOND]:
                logger.warning(f"Rows {report.beyond}. Further ones are only counted.")
            self._counts[BEYOND] += report.beyond.count
        self._counts[MERGED] += report.merged

    def _add_rows(self, what_happened: str, rows: tuple[int, ...]) -> None:
        if rows and not self._counts[what_happened]:
            logger.warning(f"Row {rows[0]} is {what_happened}; further ones are only counted.")
        self._counts[what_happened] += len(rows)

    def log_totals(self) -> None:
        """Log the counts of a stream that was read to its end."""
        events = [f"{count:,} {event}" for event, count in self._counts.items() if count]
        if events:
            logger.warning(f"Rows of the stream: {'; '.join(events)}.")
