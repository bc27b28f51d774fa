"""Preference examples as token ids: a prompt, and the answers that share it."""

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import chain, islice, pairwise
from numbers import Real
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value

from ..ops.masking import common_prefix_length
from ..ops.preference_losses import kl_partners
from .bounds import ModelBounds
from .conversations import (
    align_answers,
    as_messages,
    warn_of_equal_answers,
    warn_of_repeated_prompt,
)
from .encode import Ids, TextEncoder
from .formats import Row, extract_prompt, malformed_prompt, maybe_extract_prompt
from .prepare import (
    BATCH,
    NO_BOUNDS,
    CutReport,
    D,
    ItemDataset,
    arrow_column,
    first_row,
    items,
    prepared,
)
from .rows import AnswerGroup
from .supervised import SupervisedOptions, encode_aligned

FEATURES = Features(
    prompt_ids=List(Value("int32")),
    answers_ids=List(List(Value("int32"))),
    ranks=List(Value("int32")),  # of the answers: the lowest is the best
    label=Value("bool"),  # None without
    margin=Value("float64"),
    source=Value("int64"),  # row of the dataset
    merged=Value("int32"),  # 1 where a token stands for characters of prompt and answer
    largest_id=Value("int32"),  # added by `make_rows`
)
OLD_NAMES = {f"{x}_input_ids": f"{x}_ids" for x in ("prompt", "completion", "chosen", "rejected")}
OLD_NAMES |= {f"input_ids_{x}": f"{x}_ids" for x in ("chosen", "rejected")}
KINDS = {
    "ranked": {"prompt", "answers", "ranks"},
    "pair": {"chosen", "rejected"},
    "labelled": {"prompt", "completion", "label"},
}
COLUMNS = {
    "pair": "'chosen' and 'rejected' (with 'prompt', or a common beginning)",
    "labelled": "'prompt', 'completion' and 'label'",
    "ranked": "'prompt', 'answers' and 'ranks'",
}
USERS = {
    "pair": "Pairs are for DPO, KTO and reward models.",
    "labelled": "Answers with a label are for KTO (`trl kto`).",
    "ranked": "Ranked answers are for reward models (`trl reward`).",
}
ANSWERS = ("chosen", "rejected", "completion")
Answers = tuple[Ids, list[Ids], bool]  # prompt, answers, whether a token stands for both


@dataclass(frozen=True)
class Learner:
    """Who learns from preferences, as messages call it, and from which `kinds`, keys of `KINDS`."""

    name: str = "Learning from preferences"
    kinds: tuple[str, ...] = ("pair", "labelled", "ranked")


ANYONE = Learner()


def kind_of_preferences(example: Mapping[str, Any], learner: Learner = ANYONE) -> str:
    """Say what the examples of a dataset are, from the first: a kind that the `learner` takes.

    ValueError: they are none of these.
    """
    names = {_plain(name) for name in example}
    fitting = [kind for kind, needed in KINDS.items() if needed <= names]
    if chosen := [kind for kind in fitting if kind in learner.kinds]:
        return chosen[0]
    needed = "; or ".join(COLUMNS[kind] for kind in learner.kinds)
    users = "".join(f" {USERS[kind]}" for kind in fitting)
    raise ValueError(
        f"The examples have the columns {sorted(example)}. {learner.name} needs {needed}.{users}"
    )


def _plain(name: str) -> str:
    return OLD_NAMES.get(name, name).removesuffix("_ids")


def encode_answers(rows: Sequence[Row], encoder: TextEncoder) -> Iterator[Answers]:
    """Encode prompts with their answers, which are aligned, so that they share its tokens."""
    pairs = [row | {"completion": answer} for row in rows for answer in row["answers"]]
    each = iter(encode_aligned(pairs, "completion", encoder, SupervisedOptions()))
    for row in rows:
        ids, trained, _, merged, _ = zip(*islice(each, len(row["answers"])), strict=True)
        # The prompt is what its answers share before the first token that is trained on.
        alike = [common_prefix_length(ids[0], other) for other in ids[1:]]
        split = min(alike + [int(np.append(mask, True).argmax()) for mask in trained])
        yield ids[0][:split], [one[split:] for one in ids], any(merged)


def _tokenized_answers(row: Row) -> Answers:
    """Prompt and answers of a row that holds their ids."""
    prompt = row.get("prompt") or []
    smallest = min(chain(prompt, *row["answers"]), default=0)
    if smallest < 0:
        raise ValueError(f"the prompt or an answer has the id {smallest}, but ids begin with 0.")
    return prompt, row["answers"], False


def _with_answers(row: dict[str, Any], kind: str) -> dict[str, Any]:
    """Any example as a prompt with answers and their ranks, of which the lowest is the best."""
    is_tokenized = any(OLD_NAMES.get(name, name).endswith("_ids") for name in row)
    row = {_plain(name): value for name, value in row.items()}
    if is_tokenized and kind == "pair":
        row |= maybe_extract_prompt(row)
    answers = _answers(row, kind)
    ranks = _ranks(row) if kind == "ranked" else list(range(len(answers)))
    row |= {"ranks": ranks, "label": _label(row) if kind == "labelled" else None}
    if is_tokenized:
        return row | {"answers": list(answers.values())}
    if kind == "pair" and row.get("prompt") is None:
        prompt, values = _without_prompt(answers)
    else:
        prompt, values = align_answers(row.get("prompt"), answers)
    return row | {"prompt": prompt, "answers": values}


def _answers(row: Row, kind: str) -> dict[str, Any]:
    """The answers of an example, as messages call them."""
    if kind != "ranked":
        return {name: row[name] for name in ANSWERS if name in KINDS[kind]}
    for column in ("answers", "ranks"):
        if not row[column]:
            raise ValueError(f"{column!r} is {row[column]!r}: it must be a list of at least one.")
    return {f"answers[{i}]": answer for i, answer in enumerate(row["answers"])}


def _label(row: Row) -> bool:
    if row["label"] not in (True, False):
        raise ValueError(f"the label must be True or False, not {row['label']!r}.")
    return bool(row["label"])


def _ranks(row: Row) -> list[int]:
    answers, ranks = len(row["answers"]), len(row["ranks"])
    if answers != ranks:
        raise ValueError(f"{answers} answers need as many ranks, not {ranks}.")
    if not all(isinstance(rank, Real) and rank == rank // 1 for rank in row["ranks"]):
        raise ValueError(
            f"ranks must be integers, of which the lowest is the best, not {row['ranks']!r:.60}."
        )
    return list(map(int, row["ranks"]))


def _margin(row: Row) -> float:
    margin = row.get("margin") or 0.0
    if not isinstance(margin, Real):
        raise ValueError(f"the margin must be a number, not {margin!r:.60}.")
    return float(margin)


def _without_prompt(pair: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """Split what a pair has in common off, as its prompt."""
    for column, value in pair.items():
        if value is None:
            raise ValueError(f"{column!r} {malformed_prompt(None, column)}")
    if len({isinstance(value, str) for value in pair.values()}) > 1:
        raise TypeError("'chosen' and 'rejected' must both be text or both be messages.")
    if not isinstance(pair["chosen"], str):
        pair = {column: as_messages(value, column) for column, value in pair.items()}
    parts = extract_prompt(dict(pair))
    return parts["prompt"], [parts["chosen"], parts["rejected"]]


def encode_preferences(
    rows: Sequence[Row], kind: str, encoder: TextEncoder, unpaired: bool = False
) -> list[tuple[Any, ...]]:
    """Values of `FEATURES` of examples: two rows next to each other if pairs are taken apart."""
    known = [_with_answers(row, kind) for row in rows]
    if any(OLD_NAMES.get(name, name).endswith("_ids") for name in rows[0]):
        encoded: Iterable[Answers] = map(_tokenized_answers, known)
    else:
        encoded = encode_answers(known, encoder)
    found: list[tuple[Any, ...]] = []
    for place, (row, (prompt, answers, merged)) in enumerate(zip(known, encoded, strict=True)):
        facts = (_margin(row), place, int(merged))
        if unpaired and kind == "pair":
            found.append((prompt, answers[:1], [0], True, *facts))
            found.append((prompt, answers[1:], [0], False, *facts))
        else:
            found.append((prompt, answers, row["ranks"], row["label"], *facts))
    return found


def prepare_preferences(
    dataset: D,
    encoder: TextEncoder,
    unpaired: bool = False,
    num_proc: int | None = None,
    learner: Learner = ANYONE,
) -> D:
    """Encode pairs, labelled or ranked answers, of strings, messages or ids, in full length.

    The first row decides what all are; what answers have in common is in the prompt. With
    `unpaired`, each pair becomes two labelled rows. ValueError: as of `prepare_supervised`, or the
    dataset is not for this `learner`.
    """
    example = first_row(dataset)
    kind = kind_of_preferences(example, learner)
    warn_of_repeated_prompt(example, [name for name in ANSWERS if name in example])
    if kind == "pair":
        warn_of_equal_answers(example)
    encode = partial(encode_preferences, kind=kind, encoder=encoder, unpaired=unpaired)
    return prepared(dataset, encode, FEATURES, [kind, unpaired, encoder.digest], num_proc)


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


class AnswerDataset(ItemDataset):
    """Prepared preferences, without those of which an answer has no tokens left.

    An id that is not within the `bounds` of the model is a ValueError.
    """

    def __init__(self, table: Dataset, limits: PreferenceLimits, bounds: ModelBounds = NO_BOUNDS):
        bounds.check_ids(table)
        prompts, sizes, exists = preference_lengths(table)
        kept, left = limits.lengths(prompts, sizes)
        long, good = (kept < prompts) | (left < sizes).any(axis=1), left.min(axis=1) > 0
        self._kept, self._left = kept[good], left[good]
        answers, left = (sizes * exists).sum(axis=1), (left * exists).sum(axis=1)
        trained_lost = answers.sum() - left[good].sum()
        lost = int(prompts.sum() - kept[good].sum() + trained_lost), int(trained_lost)
        rows = table if good.all() else table.select(np.flatnonzero(good))
        report = CutReport.of(table, long, ~good, *lost)
        longest = self._kept + self._left.max(axis=1, initial=0)
        beyond = bounds.rows_beyond(longest, np.asarray(rows["source"][:]))
        # The tokens that a model sees: those of the prompt once.
        super().__init__(rows, (kept + left)[good], dataclasses.replace(report, beyond=beyond))
        self.values: dict[str, np.ndarray] = {}  # (items, ...), besides what rows know
        self.limits = limits

    def item(self, at: int) -> AnswerGroup:
        """Make an item."""
        row, answers = self.rows[at], []
        prompt = row["prompt_ids"][len(row["prompt_ids"]) - int(self._kept[at]) :]
        keeps_end = self.limits.truncation_mode == "keep_end"
        for ids, size in zip(row["answers_ids"], self._left[at].tolist(), strict=False):
            stop = len(ids[: self.limits.max_completion_length]) if keeps_end else size
            answers.append(ids[stop - size : stop])
        known = {name: row[name] for name in ("margin", "label", "ranks") if row[name] is not None}
        known |= {name: values[at].tolist() for name, values in self.values.items()}
        return AnswerGroup(prompt, answers, row["source"], known)


class MismatchedDataset(ItemDataset):
    """Answers with a label, each with another example's answer after it (see `kl_partners`)."""

    def __init__(self, answers: AnswerDataset, seed: int):
        self._answers = answers
        self.values = answers.values
        sources = answers.rows["source"][:]
        digests, lengths = answer_digests(answers.rows)
        order = np.random.default_rng(seed).permutation(len(digests)).tolist()
        partners = dict(kl_partners((digests[i], sources[i], i) for i in order))
        self.partners = np.array([partners[i] for i in range(len(digests))])
        super().__init__(answers.rows, answers.lengths + lengths[self.partners], answers.report)

    def item(self, at: int) -> AnswerGroup:
        other = self._answers[int(self.partners[at])]
        return with_mismatched(self._answers[at], other, self._answers.limits)


def answer_digests(table: Dataset) -> tuple[list[bytes], np.ndarray]:
    """Digest and number of tokens of each answer, for rows with one answer each.

    Two answers have equal digests if their ids are equal. A few rows are read at a time.
    """
    digests: list[bytes] = []
    lengths: list[np.ndarray] = []
    for batch in table.select_columns("answers_ids").with_format("arrow").iter(BATCH):
        for answers in pc.list_flatten(batch["answers_ids"]).iterchunks():
            tokens = answers.values.to_numpy()
            offsets = answers.offsets.to_numpy()
            lengths.append(np.diff(offsets))
            for start, stop in pairwise(offsets.tolist()):
                digests.append(blake2b(tokens[start:stop], digest_size=16).digest())
    return digests, np.concatenate(lengths)


def with_others(items: Iterator[AnswerGroup], limits: PreferenceLimits) -> Iterator[AnswerGroup]:
    for one, other in kl_partners((tuple(x.answer_ids[0]), x.source, x) for x in items):
        yield with_mismatched(one, other, limits)


def with_mismatched(item: AnswerGroup, other: AnswerGroup, limits: PreferenceLimits) -> AnswerGroup:
    """Put the answer of another item after that of an item, cut to the room that is left."""
    room = max((limits.max_length or sys.maxsize) - len(item.prompt_ids), 1)
    return dataclasses.replace(item, answer_ids=[*item.answer_ids, other.answer_ids[0][:room]])


def preference_lengths(table: Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of prompts (rows,) and answers (rows, K), the first's for one missing; which exist."""
    groups = arrow_column(table, "answers_ids")
    counts, sizes = items(groups), items(pc.list_flatten(groups))
    column = np.arange(counts.max(initial=0))
    exists = column < counts[:, None]
    at = (np.cumsum(counts) - counts)[:, None] + column * exists
    return items(arrow_column(table, "prompt_ids")), sizes[at], exists
