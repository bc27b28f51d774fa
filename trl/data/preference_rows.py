"""Preference examples as token ids: a prompt, and the answers that share it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from numbers import Real
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Features, List, Value

from ..ops.masking import common_prefix_length
from .conversations import (
    align_answers,
    as_messages,
    warn_of_equal_answers,
    warn_of_repeated_prompt,
)
from .encode import Ids, TextEncoder
from .formats import Row, extract_prompt, malformed_prompt, maybe_extract_prompt
from .prepare import (
    ArrowColumns,
    D,
    RowEncoder,
    encode_dataset,
    first_row,
    id_lists,
    is_prepared,
)
from .supervised import SupervisedOptions, encode_aligned

_COMMON = {
    "source": Value("int64"),  # row of the dataset
    "merged": Value("int32"),  # 1 where a token stands for characters of prompt and answer
}
_IDS = List(Value("int32"))
# Columns of prepared rows by kind.
FEATURES = {
    "pair": Features(
        prompt_ids=_IDS,
        chosen_ids=_IDS,
        rejected_ids=_IDS,
        margin=Value("float64"),  # 0.0 without
        **_COMMON,
    ),
    "labelled": Features(
        prompt_ids=_IDS,
        completion_ids=_IDS,
        label=Value("bool"),
        **_COMMON,
    ),
    "ranked": Features(
        prompt_ids=_IDS,
        answers_ids=List(_IDS),
        ranks=List(Value("int32")),  # of the answers: the lowest is the best
        margin=Value("float64"),
        **_COMMON,
    ),
}
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
    """Who learns from preferences, as messages call it, and which keys of `KINDS` it `accepts`."""

    name: str = "Learning from preferences"
    accepts: tuple[str, ...] = ("pair", "labelled", "ranked")


ANYONE = Learner()


def kind_of_preferences(example: Mapping[str, Any], learner: Learner = ANYONE) -> str:
    """Say what the examples of a dataset are, from the first: a kind that the `learner` takes.

    ValueError: they are none of these.
    """
    names = {_plain(name) for name in example}
    fitting = [name for name, needed in KINDS.items() if needed <= names]
    if accepted := [name for name in fitting if name in learner.accepts]:
        return accepted[0]
    needed = "; or ".join(COLUMNS[name] for name in learner.accepts)
    users = "".join(f" {USERS[name]}" for name in fitting)
    raise ValueError(
        f"The examples have the columns {sorted(example)}. {learner.name} needs {needed}.{users}"
    )


def _plain(name: str) -> str:
    return OLD_NAMES.get(name, name).removesuffix("_ids")


def encode_answers(rows: Sequence[Row], encoder: TextEncoder) -> Iterator[Answers]:
    """Encode prompts with their answers, which are aligned, so that they share its tokens."""
    pairs = [row | {"completion": answer} for row in rows for answer in row["answers"]]
    documents = iter(encode_aligned(pairs, "completion", encoder, SupervisedOptions()))
    for row in rows:
        group = list(islice(documents, len(row["answers"])))
        ids = [document.input_ids for document in group]
        # The prompt is what its answers share before the first token that is in the loss.
        shared = [common_prefix_length(ids[0], other) for other in ids[1:]]
        masks = [document.loss_mask for document in group]
        split = min(shared + [int(np.append(mask, True).argmax()) for mask in masks])
        merged = any(document.merged for document in group)
        yield ids[0][:split], [answer[split:] for answer in ids], merged


def _tokenized_answers(row: Row) -> Answers:
    """Prompt and answers of a row that holds their ids."""
    prompt = row.get("prompt") or []
    smallest = min(chain(prompt, *row["answers"]), default=0)
    if smallest < 0:
        raise ValueError(f"the prompt or an answer has the id {smallest}, but ids begin with 0.")
    return prompt, row["answers"], False


def _with_answers(row: dict[str, Any], example_kind: str) -> dict[str, Any]:
    """Any example as a prompt with answers and their ranks, of which the lowest is the best."""
    is_tokenized = any(OLD_NAMES.get(name, name).endswith("_ids") for name in row)
    row = {_plain(name): value for name, value in row.items()}
    if is_tokenized and example_kind == "pair":
        row |= maybe_extract_prompt(row)
    answers = _answers(row, example_kind)
    ranks = _ranks(row) if example_kind == "ranked" else list(range(len(answers)))
    row |= {"ranks": ranks, "label": _label(row) if example_kind == "labelled" else None}
    if is_tokenized:
        return row | {"answers": list(answers.values())}
    if example_kind == "pair" and row.get("prompt") is None:
        prompt, values = _without_prompt(answers)
    else:
        prompt, values = align_answers(row.get("prompt"), answers)
    return row | {"prompt": prompt, "answers": values}


def _answers(row: Row, example_kind: str) -> dict[str, Any]:
    """The answers of an example, as messages call them."""
    if example_kind != "ranked":
        return {name: row[name] for name in ANSWERS if name in KINDS[example_kind]}
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


@dataclass(slots=True)
class EncodedAnswers:
    """A prompt with answers, as token ids."""

    prompt_ids: Ids
    answers_ids: list[Ids]
    ranks: list[int]
    label: bool | None
    margin: float
    merged: int
    example: int  # position of the example in its batch


def encode_preferences(
    rows: Sequence[Row], example_kind: str, encoder: TextEncoder, unpaired: bool = False
) -> list[EncodedAnswers]:
    """Encode examples: two rows next to each other for each if pairs are taken apart."""
    examples = [_with_answers(row, example_kind) for row in rows]
    if any(OLD_NAMES.get(name, name).endswith("_ids") for name in rows[0]):
        encoded: Iterable[Answers] = map(_tokenized_answers, examples)
    else:
        encoded = encode_answers(examples, encoder)
    result: list[EncodedAnswers] = []
    pairs = zip(examples, encoded, strict=True)
    for number, (example, (prompt, answers, merged)) in enumerate(pairs):
        row = EncodedAnswers(
            prompt_ids=prompt,
            answers_ids=answers,
            ranks=example["ranks"],
            label=example["label"],
            margin=_margin(example),
            merged=int(merged),
            example=number,
        )
        if unpaired and example_kind == "pair":
            result.append(replace(row, answers_ids=answers[:1], label=True))
            result.append(replace(row, answers_ids=answers[1:], label=False))
        else:
            result.append(row)
    return result


def pair_columns(rows: Sequence[EncodedAnswers]) -> ArrowColumns:
    """Write encoded pairs down as columns."""
    return _common_columns(rows) | {
        "chosen_ids": id_lists([row.answers_ids[0] for row in rows]),
        "rejected_ids": id_lists([row.answers_ids[1] for row in rows]),
        "margin": pa.array([row.margin for row in rows], pa.float64()),
    }


def labelled_columns(rows: Sequence[EncodedAnswers]) -> ArrowColumns:
    """Write encoded answers with a label down as columns."""
    return _common_columns(rows) | {
        "completion_ids": id_lists([row.answers_ids[0] for row in rows]),
        "label": pa.array([row.label for row in rows], pa.bool_()),
    }


def ranked_columns(rows: Sequence[EncodedAnswers]) -> ArrowColumns:
    """Write encoded ranked answers down as columns."""
    edges = np.cumsum([0, *(len(row.answers_ids) for row in rows)])
    answers = id_lists([ids for row in rows for ids in row.answers_ids])
    return _common_columns(rows) | {
        "answers_ids": pa.ListArray.from_arrays(pa.array(edges, pa.int32()), answers),
        "ranks": id_lists([row.ranks for row in rows]),
        "margin": pa.array([row.margin for row in rows], pa.float64()),
    }


def _common_columns(rows: Sequence[EncodedAnswers]) -> ArrowColumns:
    return {
        "prompt_ids": id_lists([row.prompt_ids for row in rows]),
        "merged": pa.array([row.merged for row in rows], pa.int32()),
    }


WRITERS = {"pair": pair_columns, "labelled": labelled_columns, "ranked": ranked_columns}


def prepare_preferences(
    dataset: D,
    encoder: TextEncoder,
    unpaired: bool = False,
    num_proc: int | None = None,
    learner: Learner = ANYONE,
) -> D:
    """Encode pairs, labelled or ranked answers, of strings, messages or ids, in full length.

    The first row decides what all are; what answers have in common is in the prompt. With
    `unpaired`, each pair becomes two labelled rows. A dataset that is prepared is returned.
    ValueError: as of `prepare_supervised`, or the dataset is not for this `learner`.
    """
    example = first_row(dataset)
    example_kind = kind_of_preferences(example, learner)
    prepared_kind = "labelled" if unpaired and example_kind == "pair" else example_kind
    features = FEATURES[prepared_kind]
    if is_prepared(dataset, features):
        return drop_derived_columns(dataset)
    warn_of_repeated_prompt(example, [name for name in ANSWERS if name in example])
    if example_kind == "pair":
        warn_of_equal_answers(example)
    rows = RowEncoder(
        encode=partial(
            encode_preferences, example_kind=example_kind, encoder=encoder, unpaired=unpaired
        ),
        columns=WRITERS[prepared_kind],
        features=features,
    )
    return encode_dataset(dataset, rows, [example_kind, unpaired, encoder.digest], num_proc)


def drop_derived_columns(dataset: D) -> D:
    """Leave out columns that depend on other rows, or on the reference: they are made anew."""
    names = dataset.column_names or []
    derived = [name for name in names if name == "kl_completion_ids" or name.startswith("ref_")]
    return dataset.remove_columns(derived) if derived else dataset
