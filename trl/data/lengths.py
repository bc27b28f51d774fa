"""How long the rows of a dataset are, and what a limit on their length would cost."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset

from ..ops.masking import common_prefix_length
from ..ops.packing import best_fit
from .arrow_lists import arrow_column, count_in_ranges, numbers, row_lengths
from .cutting import CutReport, DocumentLimits, cut_documents, is_target
from .packing import pieces
from .preference_cutting import PreferenceLimits, cut_preferences, preference_lengths

PERCENTILES = {"min": 0, **{f"p{p:g}": p for p in (5, 25, 50, 75, 90, 95, 99, 99.9)}, "max": 100}
BATCHES = (1, 2, 4, 8, 16)
BINS = 40
Table = list[dict[str, Any]]


@dataclass(frozen=True)
class LengthProfile:
    """Facts on the lengths of a prepared dataset, as `--json` prints them."""

    rows: int
    tokens: int
    parts: dict[str, dict[str, float]]  # percentiles and sums by part
    longest: list[tuple[int, int]]  # row of the dataset, tokens
    limits: Table  # what each max_length would cost
    padding: Table  # share of positions that are padding, by batch size
    repeated: dict[str, float]  # share of tokens that stand in the model more than once
    histogram: dict[str, list[int]]  # edges of bins of row lengths, and rows in each
    packing: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    largest_that_fits: int | None = None  # limit that the memory of the device allows, if known

    def warn(self, problem: str, count: int) -> None:
        """Warn that so many rows have a problem, if there are any."""
        if count:
            self.warnings.append(f"Warning: {problem} in {count} of {self.rows} rows.")


def profile_supervised(
    table: Dataset, max_lengths: Sequence[int] = (), pack_size: int | None = None
) -> LengthProfile:
    """Profile a dataset as of `prepare_supervised`; without a pack size, it is the longest row."""
    lengths = row_lengths(table, "input_ids")
    report = cut_documents(table).report
    starts, ends = pieces(lengths)
    labels = pc.list_flatten(arrow_column(table, "labels"))
    trained = count_in_ranges(labels, is_target, starts, ends)
    lengths_by_part = {"prompt": lengths - trained, "trained": trained, "row": lengths}

    def cut(size: int) -> dict[str, int]:
        last_labels = labels.take(ends[lengths > size] - 1)
        report = cut_documents(table, DocumentLimits(max_length=size)).report
        return _limit(report) | {"ends lost": int(is_target(np.asarray(last_labels)).sum())}

    size = pack_size or int(lengths.max(initial=1))
    repeated = {"repeated share in the batch of all rows": repeated_share(table["input_ids"])}
    sources = numbers(table, "source").tolist()
    profile = _profile(lengths_by_part, sources, cut, max_lengths, repeated)
    cut_lengths = cut_documents(table, DocumentLimits(max_length=size)).lengths
    profile.packing.update(_packing(cut_lengths, size))
    profile.warn("no token to train on", len(report.untrained))
    profile.warn("a token across the edge of what is trained", report.merged)
    return profile


def _limit(report: CutReport) -> dict[str, int]:
    return {
        "rows cut": len(report.long),
        "tokens lost": report.tokens_lost,
        "trained lost": report.trained_lost,
        "rows untrained": len(report.untrained),
    }


def profile_preferences(table: Dataset, max_lengths: Sequence[int] = ()) -> LengthProfile:
    """Profile a dataset as of `prepare_preferences`; a pack is as large as its longest row."""
    lengths = preference_lengths(table)
    prompts = lengths.prompts
    answers = lengths.answers
    paired = "chosen_ids" in table.column_names
    names = ["chosen", "rejected"] if paired else [f"answer {k}" for k in range(answers.shape[1])]
    whole = prompts + answers.max(axis=1)
    lengths_by_part = {"prompt": prompts, **dict(zip(names, answers.T, strict=True)), "row": whole}

    def cut(size: int) -> dict[str, int]:
        return _limit(cut_preferences(table, PreferenceLimits(max_length=size)).report)

    separate = ((prompts[:, None] + answers) * lengths.exists).sum()
    together = prompts.sum() + lengths.of_answers.sum()
    repeated = {"repeated share in the answers of a prompt": 1 - together / max(separate, 1)}
    sources = numbers(table, "source").tolist()
    profile = _profile(lengths_by_part, sources, cut, max_lengths, repeated)
    profile.packing.update(_packing(whole, int(whole.max(initial=1))))
    profile.warn("an empty answer", int((answers == 0).any(axis=1).sum()))
    if paired:
        pairs = zip(table["chosen_ids"], table["rejected_ids"], strict=True)
        profile.warn("the same answer twice", sum(chosen == rejected for chosen, rejected in pairs))
    return profile


def profile_prompts(
    prompts: Sequence[Sequence[int]], group_size: int, max_lengths: Sequence[int] = ()
) -> LengthProfile:
    """Profile prompts of token ids, each of which gets a group of completions."""
    lengths = np.fromiter(map(len, prompts), dtype=np.int64, count=len(prompts))

    def cut(size: int) -> dict[str, int]:
        lost = np.maximum(lengths - size, 0)
        return {"rows cut": int((lost > 0).sum()), "tokens lost": int(lost.sum())}

    repeated = {
        "repeated share in the groups of a prompt": 1 - 1 / group_size,
        "repeated share in the batch of all rows": repeated_share(prompts),
    }
    return _profile({"prompt": lengths}, range(len(lengths)), cut, max_lengths, repeated)


def candidates(lengths: np.ndarray, further: Sequence[int] = ()) -> list[int]:
    """Limits worth judging: powers of two up to the longest row, p90 to p100, and further ones."""
    top = int(lengths.max(initial=1))
    powers = [2**k for k in range(6, top.bit_length() + 1)]
    high = np.percentile(lengths, (90, 95, 99, 100), method="higher").astype(int).tolist()
    return sorted({*powers, *high, *further})


def repeated_share(rows: Iterable[Sequence[int]]) -> float:
    """Share of tokens in beginnings that other rows have too, which a prefix tree holds once."""
    ordered = sorted(list(ids) for ids in rows)
    total = sum(map(len, ordered))
    again = sum(common_prefix_length(*pair) for pair in pairwise(ordered))
    return again / total if total else 0.0


def padding_table(lengths: np.ndarray) -> Table:
    """Share of positions that are padding, for rows as they come and sorted by length."""
    orders = {"padding": lengths, "sorted": np.sort(lengths)}
    return [{"batch": n} | {name: _padding(x, n) for name, x in orders.items()} for n in BATCHES]


def _padding(lengths: np.ndarray, size: int) -> float:
    starts = np.arange(0, len(lengths), size)
    positions = np.maximum.reduceat(lengths, starts) @ np.diff(starts, append=len(lengths))
    return round(1 - float(lengths.sum()) / max(float(positions), 1), 4)


def _profile(
    lengths_by_part: dict[str, np.ndarray],
    source: Sequence[int],
    cut: Callable[[int], dict[str, int]],
    max_lengths: Sequence[int],
    repeated: dict[str, float],
) -> LengthProfile:
    """Make a profile; the last of the parts is the whole row, and `cut` judges a limit."""
    *_, lengths = lengths_by_part.values()
    longest = np.argsort(-lengths, kind="stable")[:3].tolist()
    top = int(lengths.max(initial=1))
    edges = np.unique(np.linspace(0, top + 1, min(BINS, top + 1) + 1).astype(int))
    histogram = {"edges": edges.tolist(), "rows": np.histogram(lengths, edges)[0].tolist()}
    return LengthProfile(
        rows=len(lengths),
        tokens=int(lengths.sum()),
        parts={name: _summary(values) for name, values in lengths_by_part.items()},
        longest=[(source[i], int(lengths[i])) for i in longest],
        limits=[{"max_length": n} | cut(n) for n in candidates(lengths, max_lengths)],
        padding=padding_table(lengths),
        repeated=repeated,
        histogram=histogram,
    )


def _packing(lengths: np.ndarray, size: int) -> dict[str, float]:
    packs = best_fit(lengths, size)
    return {
        "pack size": size,
        "packs": len(packs),
        "packing efficiency": float(lengths.sum()) / (len(packs) * size) if packs else 1.0,
        "documents in a pack": int((lengths > 0).sum()) / max(len(packs), 1),
    }


def _summary(values: np.ndarray) -> dict[str, float]:
    percentiles = np.percentile(values, [*PERCENTILES.values()], method="higher")
    sums = {"mean": round(float(values.mean()), 1), "tokens": int(values.sum())}
    return dict(zip(PERCENTILES, percentiles.astype(int).tolist(), strict=True)) | sums
