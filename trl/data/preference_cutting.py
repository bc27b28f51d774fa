"""Cutting prepared preferences to length, and the answers of other rows that KTO scores."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value

from ..ops.preference_losses import kl_partners
from .arrow_lists import (
    Ranges,
    arrow_column,
    list_lengths,
    numbers,
    row_lengths,
    spread_lists,
    spread_numbers,
    with_columns,
)
from .bounds import ModelBounds
from .cutting import NO_BOUNDS, Cut, CutReport
from .examples import Example, answer_names, to_examples
from .prepare import BATCH, fingerprint

PARTNER = "kl_completion_ids"
PARTNERS_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class PreferenceLimits:
    """How long prompts and answers may be: options of the same names.

    With the mode "drop", what is longer than `max_length` is left out instead of cut.
    """

    max_length: int | None = None
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    truncation_mode: str = "keep_start"

    def __str__(self) -> str:
        return ", ".join(f"{name}={x}" for name, x in vars(self).items() if isinstance(x, int))

    def lengths(self, prompts: np.ndarray, answers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that are kept of prompts (rows,) and of their answers (rows, K)."""
        prompts = np.minimum(prompts, self.max_prompt_length or sys.maxsize)
        answers = np.minimum(answers, self.max_completion_length or sys.maxsize)
        if self.max_length is None:
            return prompts, answers
        room = self.max_length - answers.max(axis=1)
        if self.truncation_mode == "drop":
            fits = prompts <= room
            return prompts * fits, answers * fits[:, None]
        if self.truncation_mode == "keep_end":
            prompts = np.minimum(prompts, np.maximum(room, 1))
        return prompts, np.clip(self.max_length - prompts[:, None], 0, answers)

    def stops(self, answers: np.ndarray, left: np.ndarray) -> np.ndarray:
        """Where answers with so many tokens end if so many of these are left."""
        if self.truncation_mode == "keep_end":
            return np.minimum(answers, self.max_completion_length or sys.maxsize)
        return left

    def room_behind(self, prompts: np.ndarray) -> np.ndarray:
        """Tokens that an answer may have after prompts of these lengths; at least one."""
        return np.maximum((self.max_length or sys.maxsize) - prompts, 1)


@dataclass(frozen=True)
class PreferenceLengths:
    """Tokens of prepared preferences. Where an answer is missing, the first one's are repeated."""

    prompts: np.ndarray  # (rows,)
    answers: np.ndarray  # (rows, K)
    exists: np.ndarray  # (rows, K) bool

    @property
    def of_answers(self) -> np.ndarray:
        """Tokens of all answers of each row (rows,)."""
        return (self.answers * self.exists).sum(axis=1)


def answer_columns(dataset: Dataset) -> list[str]:
    """The columns that have one answer of each row."""
    names = ("chosen_ids", "rejected_ids", "completion_ids")
    return [name for name in names if name in dataset.column_names]


def preference_lengths(dataset: Dataset) -> PreferenceLengths:
    """Count the tokens of prepared preferences."""
    prompts = row_lengths(dataset, "prompt_ids")
    if columns := answer_columns(dataset):
        lengths = [row_lengths(dataset, name) for name in columns]
        answers = np.stack(lengths, axis=1)
        return PreferenceLengths(prompts, answers, np.ones(answers.shape, dtype=bool))
    ranked = arrow_column(dataset, "answers_ids")
    counts = pc.list_value_length(ranked).to_numpy().astype(np.int64)
    sizes = list_lengths(pc.list_flatten(ranked))
    column = np.arange(counts.max(initial=0))
    exists = column < counts[:, None]
    positions = (np.cumsum(counts) - counts)[:, None] + column * exists
    return PreferenceLengths(prompts, sizes[positions], exists)


def cut_preferences(
    prepared: Dataset, limits: PreferenceLimits, bounds: ModelBounds = NO_BOUNDS
) -> Cut:
    """Cut prepared preferences, and leave out those of which an answer has no tokens left.

    An id that is not within the `bounds` of the model is a ValueError.
    """
    bounds.check_ids(prepared)
    lengths = preference_lengths(prepared)
    prompts, answers = limits.lengths(lengths.prompts, lengths.answers)
    is_long = (prompts < lengths.prompts) | (answers < lengths.answers).any(axis=1)
    is_good = answers.min(axis=1) > 0
    rows = np.flatnonzero(is_good)
    left = (answers * lengths.exists).sum(axis=1)[rows].sum()
    trained_lost = int(lengths.of_answers.sum() - left)
    tokens_lost = int(lengths.prompts.sum() - prompts[rows].sum()) + trained_lost
    longest = prompts[rows] + answers[rows].max(axis=1, initial=0)
    report = CutReport.of(
        prepared,
        long=is_long,
        untrained=~is_good,
        tokens_lost=tokens_lost,
        trained_lost=trained_lost,
        beyond=bounds.rows_beyond(longest, numbers(prepared, "source")[rows]),
    )
    ranges: dict[str, Ranges] | None = {}
    if is_long[rows].any():
        left_lengths = PreferenceLengths(prompts, answers, lengths.exists)
        ranges = _ranges(prepared, limits, lengths, left_lengths, rows)
    return Cut(prepared, rows, ranges, report, vars(limits))


def _ranges(
    prepared: Dataset,
    limits: PreferenceLimits,
    full: PreferenceLengths,
    left: PreferenceLengths,
    rows: np.ndarray,
) -> dict[str, Ranges] | None:
    """What is left of some rows: ends of prompts, and beginnings or ends of answers."""
    columns = answer_columns(prepared)
    if not columns:  # ranked answers
        return None
    prompt_ends = np.cumsum(full.prompts)
    ranges = {"prompt_ids": Ranges(prompt_ends - left.prompts, prompt_ends)}
    for number, name in enumerate(columns):
        sizes = full.answers[:, number]
        starts = np.cumsum(sizes) - sizes
        kept_sizes = left.answers[:, number]
        stops = starts + limits.stops(sizes, kept_sizes)
        ranges[name] = Ranges(stops - kept_sizes, stops)
    return {name: Ranges(cut.starts[rows], cut.stops[rows]) for name, cut in ranges.items()}


def with_ref_logps(dataset: Dataset, logps: np.ndarray, key: str) -> Dataset:
    """Add log-probabilities (rows, K) of answers under the reference; `key` names them."""
    old = [name for name in dataset.column_names if name.startswith("ref_")]
    if old:
        dataset = dataset.remove_columns(old)
    example = to_examples(dataset.with_format("arrow")[:1])[0]
    names = [f"ref_{name}_logps" for name in answer_names(example)]
    columns = {name: logps[:, number] for number, name in enumerate(names)}
    name = fingerprint(dataset, "reference", key)
    return with_columns(dataset, partial(spread_numbers, columns), name)


# --- Answers of other rows ---


def with_kl_answers(cut: Cut, limits: PreferenceLimits, seed: int) -> Dataset:
    """Add to labelled answers the answer of another row each, as `kl_completion_ids`.

    See `kl_partners`; the seed decides in which order rows look for partners.
    """
    dataset = cut.dataset
    partners = choose_partners(cut.prepared.select(cut.rows), seed)
    rooms = limits.room_behind(row_lengths(dataset, "prompt_ids"))
    name = fingerprint(cut.prepared, ("partners", PARTNERS_VERSION), [vars(limits), seed])
    cache = None  # what is prepared in memory stays there
    if files := cut.prepared.cache_files:
        cache = str(Path(files[0]["filename"]).with_name(f"cache-{name}.arrow"))
    answers = dataset.select_columns("completion_ids").select(partners).with_format("arrow")
    answers = answers.map(
        _cut_to_rooms,
        with_indices=True,
        batched=True,
        batch_size=BATCH,
        remove_columns="completion_ids",
        features=Features({PARTNER: List(Value("int32"))}),
        fn_kwargs={"rooms": rooms},
        new_fingerprint=name,
        cache_file_name=cache,
        desc="Choosing answers for the KL estimate",
    )
    return with_columns(dataset, partial(spread_lists, answers.with_format(None)), name)


def _cut_to_rooms(batch: pa.Table, rows: list[int], rooms: np.ndarray) -> pa.Table:
    lists = batch["completion_ids"].combine_chunks()
    offsets = lists.offsets.to_numpy()
    positions = np.arange(offsets[0], offsets[-1])
    starts = np.repeat(offsets[:-1], np.diff(offsets))
    sizes = np.minimum(np.diff(offsets), rooms[rows])
    limits = np.repeat(sizes, np.diff(offsets))
    ids = lists.values.to_numpy()[offsets[0] : offsets[-1]][positions - starts < limits]
    edges = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return pa.table({PARTNER: pa.ListArray.from_arrays(pa.array(edges), pa.array(ids))})


def choose_partners(labelled: Dataset, seed: int) -> np.ndarray:
    """The number of the row whose answer is scored after each row's prompt, (rows,)."""
    sources = numbers(labelled, "source").tolist()
    digests = answer_digests(labelled)
    order = np.random.default_rng(seed).permutation(len(digests)).tolist()
    partners = dict(kl_partners((digests[row], sources[row], row) for row in order))
    return np.array([partners[row] for row in range(len(digests))])


def answer_digests(labelled: Dataset) -> list[bytes]:
    """Digest of each answer; equal ones have equal ids. A few rows are read at a time."""
    digests: list[bytes] = []
    for batch in labelled.select_columns("completion_ids").with_format("arrow").iter(BATCH):
        for answers in batch["completion_ids"].iterchunks():
            ids = answers.values.to_numpy()
            for start, stop in pairwise(answers.offsets.to_numpy().tolist()):
                digests.append(blake2b(ids[start:stop], digest_size=16).digest())
    return digests


def add_kl_answers(examples: Iterator[Example], limits: PreferenceLimits) -> Iterator[Example]:
    """Add to each example of a stream the answer of another one, see `kl_partners`."""
    rows = ((tuple(x["completion_ids"]), x["source"], x) for x in examples)
    for example, partner in kl_partners(rows):
        room = limits.room_behind(np.array(len(example["prompt_ids"])))
        answer = partner["completion_ids"][: int(room)]
        yield Example(**{**example, "kl_completion_ids": answer})
