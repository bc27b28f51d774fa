"""Preference examples as token ids: a prompt, and the answers that share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value

from .encode import Ids, TextEncoder, template_options
from .preference import common_prefix_length, extract_prompt
from .prepare import D, counted, first_row, named_rows, nothing_left, prepared, ragged, row_lengths
from .supervised import as_messages, examples, rendered_answers

Kind = Literal["pair", "labelled", "ranked"]
IDS = List(Value("int32"))
COMMON = {"prompt_ids": IDS, "source": Value("int64"), "merged": Value("int32")}
FEATURES = {
    "pair": {"chosen_ids": IDS, "rejected_ids": IDS, "margin": Value("float64")},
    "labelled": {"completion_ids": IDS, "label": Value("bool")},
    "ranked": {"answers_ids": List(IDS), "ranks": List(Value("int32"))},
}
OLD_NAMES = {
    **{"prompt_input_ids": "prompt_ids", "completion_input_ids": "completion_ids"},
    **{"chosen_input_ids": "chosen_ids", "rejected_input_ids": "rejected_ids"},
    **{"input_ids_chosen": "chosen_ids", "input_ids_rejected": "rejected_ids"},
}


def kind_of_preferences(example: Mapping[str, Any], unpaired: bool = False) -> Kind:
    """Say what the examples of a dataset are, from the first of them.

    Args:
        example: its columns.
        unpaired (`bool`): pairs are wanted as two labelled answers.

    Raises:
        ValueError: if they cannot be told.
    """
    names = {OLD_NAMES.get(name, name).removesuffix("_ids") for name in example}
    if {"answers", "ranks"} <= names:
        return "ranked"
    if {"chosen", "rejected"} <= names:
        return "labelled" if unpaired else "pair"
    if {"prompt", "completion", "label"} <= names:
        return "labelled"
    raise ValueError(
        f"The examples have the columns {sorted(example)}. Preferences are 'chosen' and "
        "'rejected' (with 'prompt', or a common beginning); 'prompt', 'completion' and 'label'; "
        "or 'prompt', 'answers' and 'ranks'."
    )


@dataclass
class AnswerGroups:
    """Prompts with the answers that share them; one entry for each group."""

    prompt_ids: list[Ids]
    answer_ids: list[list[Ids]]
    merged: list[int]  # 1 where a token stands for characters of prompt and answer


def encode_answers(rows: Sequence[dict[str, Any]], encoder: TextEncoder) -> AnswerGroups:
    """Encode prompts with their answers, so that the answers share the prompt's tokens.

    Args:
        rows: `prompt` and `answers` (at least one each), strings or lists of messages; tools and
            `chat_template_kwargs`.
        encoder: how.

    Raises:
        TypeError: if prompts and answers are not of one format.
    """
    sizes = [len(row["answers"]) for row in rows]
    flat = [row | {"answer": answer} for row in rows for answer in row["answers"]]
    if _are_strings(flat):
        found = _strings([row["prompt"] for row in rows], sizes, flat, encoder)
        groups = _groups(sizes, *found)
        groups.prompt_ids = list(map(encoder.begun, groups.prompt_ids))
        groups.answer_ids = [list(map(encoder.ended, answers)) for answers in groups.answer_ids]
        return groups
    before, after = ([as_messages(row[name]) for row in flat] for name in ("prompt", "answer"))
    options = list(map(template_options, flat))
    return _groups(sizes, *rendered_answers(before, after, options, encoder))


def _are_strings(flat: Sequence[Mapping[str, Any]]) -> bool:
    kinds = {isinstance(row[name], str) for row in flat for name in ("prompt", "answer")}
    if len(kinds) > 1:
        raise TypeError("Prompts and answers must all be strings, or all be messages.")
    return True in kinds


def _groups(sizes: list[int], whole: list[Ids], kept: list[int], merged: list[int]) -> AnswerGroups:
    """Split rows of prompt and answer where the first answer of their prompt begins."""
    groups = AnswerGroups([], [], [])
    for stop, size in zip(np.cumsum(sizes).tolist(), sizes, strict=True):
        at = slice(stop - size, stop)
        split = min(kept[at])
        groups.prompt_ids.append(whole[at.start][:split])
        groups.answer_ids.append([ids[split:] for ids in whole[at]])
        groups.merged.append(max(merged[at]))
    return groups


def _strings(
    prompts: list[str], sizes: list[int], flat: list[dict[str, Any]], encoder: TextEncoder
) -> tuple[list[Ids], list[int], list[int]]:
    """As `rendered_answers`, for answers that are strings; each prompt is encoded once."""
    pairs = zip(encoder.ids(prompts), sizes, strict=True)
    alone = [ids for ids, size in pairs for _ in range(size)]
    texts = ([row[name] for row in flat] for name in ("prompt", "answer"))
    whole, kept = encoder.continued(next(texts), alone, next(texts))
    return whole, kept, [int(k < len(p)) for k, p in zip(kept, alone, strict=True)]


def _grouped(row: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """A text example as prompt and answers."""
    if kind == "ranked":
        return dict(row)
    if "chosen" not in row:
        return {**row, "answers": [row["completion"]]}
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if prompt is None or isinstance(prompt, str) != isinstance(chosen, str):
        prompt, chosen, rejected = extract_prompt({"chosen": chosen, "rejected": rejected}).values()
    return {**row, "prompt": prompt, "answers": [chosen, rejected]}


def answers_of(row: Mapping[str, Any]) -> list[Ids]:
    """The answers of an example of token ids."""
    if "answers_ids" in row:
        return [list(ids) for ids in row["answers_ids"]]
    names = ("chosen_ids", "rejected_ids") if "chosen_ids" in row else ("completion_ids",)
    return [list(row[name]) for name in names]


def _tokenized(rows: Sequence[Mapping[str, Any]]) -> AnswerGroups:
    groups = AnswerGroups([], [], [])
    for row in rows:
        answers = answers_of(row)
        prompt = list(row.get("prompt_ids") or [])
        if row.get("prompt_ids") is None and len(answers) > 1:
            split = min(common_prefix_length(answers[0], answer) for answer in answers[1:])
            split = min([split, *(len(answer) - 1 for answer in answers)])
            prompt, answers = answers[0][:split], [answer[split:] for answer in answers]
        groups.prompt_ids.append(prompt)
        groups.answer_ids.append(answers)
        groups.merged.append(0)
    return groups


@dataclass
class _EncodePreferences:
    kind: Kind
    encoder: TextEncoder

    def __call__(self, table: pa.Table, index: list[int]) -> pa.Table:
        names = [OLD_NAMES.get(name, name) for name in table.column_names]
        columns = [table.column(name).to_pylist() for name in table.column_names]
        rows = examples(dict(zip(names, columns, strict=True)))
        with named_rows(index):
            if any(name.endswith("_ids") for name in names):
                groups = _tokenized(rows)
            else:
                groups = encode_answers([_grouped(row, self.kind) for row in rows], self.encoder)
            table = _COLUMNS[self.kind](groups, rows)
        # A labelled row of a pair stands next to the other one, so batches are mixed.
        each = 2 if self.kind == "labelled" and "chosen" in "".join(names) else 1
        table["prompt_ids"] = ragged([ids for ids in groups.prompt_ids for _ in range(each)])
        table["source"] = pa.array(np.repeat(index, each), pa.int64())
        table["merged"] = pa.array(np.repeat(groups.merged, each), pa.int32())
        return pa.table(table).select(list(features_of(self.kind)))


def _pair_columns(groups: AnswerGroups, rows: Sequence[Any]) -> dict[str, pa.Array]:
    chosen, rejected = zip(*groups.answer_ids, strict=True)
    margins = pa.array([row.get("margin") for row in rows], pa.float64())
    return {"chosen_ids": ragged(chosen), "rejected_ids": ragged(rejected), "margin": margins}


def _labelled_columns(groups: AnswerGroups, rows: Sequence[Any]) -> dict[str, pa.Array]:
    labels = [[bool(row["label"])] if "label" in row else [True, False] for row in rows]
    return {
        "completion_ids": ragged([ids for answers in groups.answer_ids for ids in answers]),
        "label": pa.array([label for found in labels for label in found], pa.bool_()),
    }


def _ranked_columns(groups: AnswerGroups, rows: Sequence[Any]) -> dict[str, pa.Array]:
    ranks = [[int(rank) for rank in row["ranks"]] for row in rows]
    for answers, found in zip(groups.answer_ids, ranks, strict=True):
        if len(answers) != len(found):
            raise ValueError(f"{len(answers)} answers have {counted(len(found), 'rank')}.")
    ids = pa.array(groups.answer_ids, pa.list_(pa.list_(pa.int32())))
    return {"answers_ids": ids, "ranks": pa.array(ranks, pa.list_(pa.int32()))}


_COLUMNS = {"pair": _pair_columns, "labelled": _labelled_columns, "ranked": _ranked_columns}


def features_of(kind: Kind) -> Features:
    """The columns of prepared examples of a kind."""
    return Features(COMMON | FEATURES[kind])


def prepare_preferences(
    dataset: D, encoder: TextEncoder, unpaired: bool = False, num_proc: int | None = None
) -> D:
    """Encode a dataset of preferences, in full length.

    Args:
        dataset: pairs, labelled or ranked answers; strings, messages or ids; its first row decides.
        encoder: how.
        unpaired (`bool`): make each pair two labelled rows next to each other.
        num_proc (`int`, *optional*): processes; None chooses.

    Returns:
        `prompt_ids`, `source` (row of the dataset), `merged` (1 where a token stands for
        characters of prompt and answer), and `chosen_ids`, `rejected_ids`, `margin` for pairs,
        `completion_ids`, `label` for labelled answers, or `answers_ids`, `ranks` (the lowest is
        the best). What an answer has in common with the others of its prompt is in the prompt.

    Raises:
        ValueError: if the dataset is empty, or its rows cannot be read.
    """
    kind = kind_of_preferences(first_row(dataset), unpaired)
    encode = _EncodePreferences(kind, encoder)
    return prepared(dataset, encode, [kind, encoder.digest], features_of(kind), num_proc)


@dataclass(frozen=True, kw_only=True)
class PreferenceLimits:
    """How long prompts and answers may be; None means any length.

    Args:
        max_prompt_length (`int`, *optional*): the last tokens of a prompt are kept.
        max_completion_length (`int`, *optional*): the first tokens of an answer are kept.
        max_length (`int`, *optional*): tokens of a prompt with an answer.
        truncation_mode (`str`): what `max_length` keeps: "keep_start" the beginning; "keep_end"
            the end (ValueError for another). All answers of a prompt go on sharing it.
    """

    max_length: int | None = None
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    truncation_mode: str = "keep_start"

    def __post_init__(self) -> None:
        if self.truncation_mode not in ("keep_start", "keep_end"):
            raise ValueError(
                f"truncation_mode={self.truncation_mode!r} is unknown; choose keep_start or "
                "keep_end."
            )

    def lengths(self, prompts: np.ndarray, answers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that are kept of prompts (rows,) and of their answers (rows, K).

        An answer of which nothing is kept leaves nothing to train on.
        """
        if self.max_prompt_length is not None:
            prompts = np.minimum(prompts, self.max_prompt_length)
        if self.max_completion_length is not None:
            answers = np.minimum(answers, self.max_completion_length)
        if self.max_length is not None:
            if self.truncation_mode == "keep_end":
                room = np.maximum(self.max_length - answers.max(axis=1), 1)
                prompts = np.minimum(prompts, room)
            answers = np.clip(self.max_length - prompts[:, None], 0, answers)
        return prompts, answers

    def cut(self, prompt: Ids, answers: Sequence[Ids]) -> tuple[Ids, list[Ids]]:
        """Cut a prompt and its answers."""
        sizes = np.array([[len(ids) for ids in answers]])
        kept, left = self.lengths(np.array([len(prompt)]), sizes)
        answers = [list(ids)[: self.max_completion_length] for ids in answers]
        ends = self.truncation_mode == "keep_end"
        cut = [
            ids[len(ids) - size :] if ends else ids[:size]
            for ids, size in zip(answers, left[0].tolist(), strict=True)
        ]
        return list(prompt)[len(prompt) - int(kept[0]) :], cut


@dataclass(frozen=True)
class CutReport:
    """What was cut off preference examples, and which of them are left out."""

    rows: int
    prompts: int  # rows whose prompt lost tokens
    answers: int  # rows an answer of which lost tokens
    tokens_lost: int
    empty: tuple[int, ...]  # rows of the dataset with an answer of no tokens, left out
    long: tuple[int, ...]  # rows of the dataset over the limit, where those are left out
    merged: int

    def lines(self) -> list[str]:
        """Say it in sentences; none if there is nothing to say."""
        rows = counted(self.rows, "row")
        cut = (
            f"{counted(self.tokens_lost, 'token')} cut off: the prompt of {self.prompts} and an "
            f"answer of {self.answers} of {rows} too long."
        )
        merged = (
            f"{self.merged} of {rows} with a token that stands for characters of both prompt and "
            "answer; it belongs to the answer."
        )
        said = [cut] * bool(self.tokens_lost)
        said += nothing_left(self.empty, rows, "an answer without tokens")
        said += nothing_left(self.long, rows, "more than max_length tokens")
        return said + [merged] * bool(self.merged)


def cut_preferences(
    table: Dataset, limits: PreferenceLimits, drop_long: bool = False
) -> tuple[Dataset, CutReport]:
    """Cut prepared examples to length, and leave out those an answer of which is empty.

    Args:
        table, limits: as of `prepare_preferences`, and how long.
        drop_long (`bool`): leave out examples over `max_length` instead, as reward models do.

    Raises:
        ValueError: if no example is left.
    """
    prompts, sizes = preference_lengths(table)
    kept, left = limits.lengths(prompts, sizes)
    longest = limits.max_length if drop_long and limits.max_length else np.inf
    fits = prompts + np.max(sizes, axis=1) <= longest
    good = fits & (np.min(left, axis=1) > 0)
    if not good.any():
        raise ValueError(
            f"None of the {len(table)} rows is left with tokens in every answer (max_length="
            f"{limits.max_length}, max_prompt_length={limits.max_prompt_length}, "
            f"max_completion_length={limits.max_completion_length}). Raise them."
        )
    source = np.asarray(table["source"][:])
    report = CutReport(
        rows=len(table),
        prompts=int((kept < prompts)[good].sum()),
        answers=int((np.max(sizes - left, axis=1) > 0)[good].sum()),
        tokens_lost=int((prompts - kept)[good].sum() + (sizes - left)[good].sum()),
        empty=tuple(source[fits & ~good].tolist()),
        long=tuple(source[~fits].tolist()),
        merged=int((np.asarray(table["merged"][:]) > 0).sum()),
    )
    return table if good.all() else table.select(np.flatnonzero(good)), report


def preference_lengths(table: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the prompts (rows,) and of their answers (rows, K).

    Where rows differ in the number of answers, the first one stands for those that are missing.
    """
    prompts = row_lengths(table, "prompt_ids")
    if "answers_ids" not in table.column_names:
        names = [n for n in ("chosen_ids", "rejected_ids", "completion_ids") if n in table.features]
        return prompts, np.stack([row_lengths(table, name) for name in names], axis=1)
    groups = [[len(ids) for ids in answers] for answers in table["answers_ids"]]
    width = max(map(len, groups), default=0)
    return prompts, np.array([found + found[:1] * (width - len(found)) for found in groups])


def mismatched(sources: Sequence[Any], answers: Sequence[Sequence[int]], seed: int) -> np.ndarray:
    """Choose for each row another row whose answer is scored under its prompt.

    The partner has another answer and comes from another example; it follows from the data and
    the seed alone, whatever the order, the batches or the ranks.

    Args:
        sources: (rows,) example each row is made from.
        answers: (rows,) its answer's ids.
        seed (`int`): chooses.

    Returns:
        (rows,) index of the partner.

    Raises:
        ValueError: if a row has no partner.
    """
    names = {answer: i for i, answer in enumerate(dict.fromkeys(map(tuple, answers)))}
    answer = np.array([names[tuple(ids)] for ids in answers])
    source = np.unique(np.asarray(sources), return_inverse=True)[1]
    order = np.random.default_rng(seed).permutation(len(answer))
    found = np.full(len(answer), -1)
    for step in range(1, len(order)):
        open_ = np.flatnonzero(found[order] < 0)
        if not len(open_):
            break
        rows, others = order[open_], order[(open_ + step) % len(order)]
        fits = (answer[rows] != answer[others]) & (source[rows] != source[others])
        found[rows[fits]] = others[fits]
    if (found < 0).any():
        raise ValueError(
            f"Row {int(np.flatnonzero(found < 0)[0])} has no partner: the KL estimate needs rows "
            "of other examples with other completions."
        )
    return found
