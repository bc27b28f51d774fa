"""Rows of prepared datasets, and how they become the groups and columns of a batch.

A document has `input_ids` and `labels`; a pair `prompt_ids`, `chosen_ids` and `rejected_ids`; an
answer with a label `prompt_ids` and `completion_ids`; ranked answers `prompt_ids` and
`answers_ids`.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import TypedDict, cast

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from torch.utils.data import Dataset as TorchDataset
from transformers import PreTrainedTokenizerBase

from ..batch import Branch, Columns, Group
from ..types import Prefix
from .arrow_lists import row_lengths
from .bounds import TOKEN_COLUMNS

IGNORED = -100  # as a label


class Example(TypedDict, total=False):
    """A row of a prepared dataset, in Python objects. Its kind decides which columns it has."""

    input_ids: list[int]
    labels: list[int]  # -100 for tokens that are not in the loss
    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    completion_ids: list[int]
    kl_completion_ids: list[int]  # of another row, for the KL estimate of KTO
    answers_ids: list[list[int]]
    ranks: list[int]  # of the answers: the lowest is the best
    label: bool
    margin: float
    source: int  # row of the dataset
    merged: int
    origin: str  # the dataset of a mixture that the row is from, or ""
    ref_chosen_logps: float  # under the reference: sums over the tokens of an answer
    ref_rejected_logps: float
    ref_completion_logps: float
    ref_kl_completion_logps: float
    is_filler: bool  # keeps the number of batches equal on all ranks


def answer_names(example: Example) -> list[str]:
    """Name the columns of an example with one answer each, in the order of its branches."""
    if "chosen_ids" in example:
        return ["chosen", "rejected"]
    return [name for name in ("completion", "kl_completion") if f"{name}_ids" in example]


def answers_of(example: Example) -> list[list[int]]:
    """The answers of an example that has a prompt."""
    if "answers_ids" in example:
        return example["answers_ids"]
    columns = cast(dict[str, list[int]], example)
    return [columns[f"{name}_ids"] for name in answer_names(example)]


def make_group(example: Example) -> Group:
    """Make a group of a prepared example, with a branch for each answer; a pair's chosen one first.

    The answer of another row, for KTO's estimate, is the last branch, and not in the loss. A
    document is divided before its first target token, and ends with the last one, since tokens
    after it would be computed for nothing. A document without target tokens is a filler.
    """
    is_filler = example.get("is_filler", False)
    if "labels" in example:
        return _document_group(example, is_filler)
    branches = [Branch(ids, [True] * len(ids)) for ids in answers_of(example)]
    if "kl_completion_ids" in example:
        kl_ids = branches[-1].ids
        branches[-1] = Branch(kl_ids, [False] * len(kl_ids))
    return Group(Prefix(example["prompt_ids"]), tuple(branches), example["source"], is_filler)


def _document_group(example: Example, is_filler: bool) -> Group:
    ids = example["input_ids"]
    labels = example["labels"]
    positions = range(1, len(labels))
    start = next((i for i in positions if labels[i] != IGNORED), None)
    has_targets = start is not None
    if start is None:
        start = min(1, len(ids) - 1)
    stop = next((i for i in reversed(positions) if labels[i] != IGNORED), start) + 1
    mask = [label != IGNORED for label in labels[start:stop]]
    return Group(
        prefix=Prefix(ids[:start]),
        branches=(Branch(ids[start:stop], mask),),
        row=example["source"],
        is_filler=is_filler or not has_targets,
        origin=example.get("origin", ""),
    )


def target_positions(example: Example) -> list[int]:
    """Positions of the tokens of a document that are in the loss; nothing predicts the first."""
    labels = enumerate(example["labels"])
    return [position for position, label in labels if position and label != IGNORED]


def batch_columns(examples: Sequence[Example]) -> Columns:
    """Collect labels, ranks, margins and reference values of answers: columns (B,) of a batch."""
    columns = Columns()
    first = examples[0]
    if "labels" in first:
        return columns
    if "label" in first:
        columns["label"] = _per_answer(examples, lambda example: example["label"], torch.bool)
    else:
        ranks = [rank for example in examples for rank in ranks_of(example)]
        columns["rank"] = torch.tensor(ranks)
        columns["margin"] = _per_answer(examples, lambda example: example["margin"], torch.float32)
    if any(name.startswith("ref_") for name in first):
        columns["ref_answer_logps"] = torch.tensor(
            [logp for example in examples for logp in reference_logps(example)]
        )
    return columns


def ranks_of(example: Example) -> list[int]:
    """Ranks of the answers of a pair, or of ranked answers; the lowest is the best."""
    return example.get("ranks", [0, 1])


def _per_answer(
    examples: Sequence[Example], value: Callable[[Example], object], dtype: torch.dtype
) -> torch.Tensor:
    values = [value(example) for example in examples for _ in answers_of(example)]
    return torch.tensor(values, dtype=dtype)


def reference_logps(example: Example) -> list[float]:
    """Log-probabilities of the answers of an example, computed beforehand."""
    columns = cast(dict[str, float], example)
    return [columns[f"ref_{name}_logps"] for name in answer_names(example)]


# --- Reading ---


def num_tokens(example: Example) -> int:
    """Tokens of an example, a prompt's once."""
    if "input_ids" in example:
        return len(example["input_ids"])
    return len(example["prompt_ids"]) + sum(map(len, answers_of(example)))


def token_counts(dataset: Dataset) -> np.ndarray:
    """Tokens of each row of a prepared dataset (rows,), a prompt's once; 0 where rows are lazy."""
    tokens = np.zeros(len(dataset), dtype=np.int64)
    for name in TOKEN_COLUMNS:
        if name in dataset.column_names:
            tokens += row_lengths(dataset, name)
    return tokens


class RowReader(TorchDataset[Example]):
    """Reads the examples of a batch of a prepared dataset, for a `DataLoader`."""

    def __init__(self, dataset: Dataset):
        self.read_from(dataset)

    def read_from(self, dataset: Dataset) -> None:
        """Read another dataset, such as one with further columns, from now on."""
        self._is_lazy = dataset.format["type"] == "custom"
        self._dataset = dataset if self._is_lazy else dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, rows: list[int]) -> list[Example]:
        """Read rows; `~row` gives a filler (see `share_of_rank`)."""
        positions = [row if row >= 0 else ~row for row in rows]
        if self._is_lazy:
            columns = self._dataset[positions]
            values = zip(*columns.values(), strict=True)
            examples = [cast(Example, dict(zip(columns, row, strict=True))) for row in values]
        else:
            examples = to_examples(self._dataset[positions])
        if rows[0] >= 0:
            return examples
        filler = examples[0]  # of one row, although a lazy row may become several examples
        filler["is_filler"] = True
        return [filler]


def to_examples(table: pa.Table) -> list[Example]:
    """Turn prepared rows into Python objects; far faster than `to_pylist` for long lists."""
    columns = [_to_list(column) for column in table.columns]
    return [
        cast(Example, dict(zip(table.column_names, values, strict=True)))
        for values in zip(*columns, strict=True)
    ]


def _to_list(column: pa.ChunkedArray) -> list[object]:
    is_list = pa.types.is_list(column.type)
    if not is_list or not pa.types.is_integer(column.type.value_type):
        values: list[object] = column.to_pylist()
        return values
    rows: list[object] = []
    for chunk in column.chunks:
        offsets = chunk.offsets.to_numpy()
        ids = chunk.values[offsets[0] : offsets[-1]].to_numpy().tolist()
        edges = (offsets - offsets[0]).tolist()
        rows += [ids[start:stop] for start, stop in itertools.pairwise(edges)]
    return rows


def format_document(
    example: Example, tokenizer: PreTrainedTokenizerBase, max_tokens: int = 200
) -> str:
    """Write the first tokens of a document, those in the loss green, or in brackets."""
    is_terminal = sys.stdout.isatty()
    opening, closing = ("\x1b[32m", "\x1b[0m") if is_terminal else ("\u27ea", "\u27eb")
    ids = example["input_ids"]
    targets = target_positions(example)
    is_target = set(targets).__contains__
    text = ""
    for in_loss, run in itertools.groupby(range(min(len(ids), max_tokens)), is_target):
        run_text = tokenizer.decode([ids[position] for position in run])
        text += f"{opening}{run_text}{closing}" if in_loss else run_text
    if len(ids) > max_tokens:
        text += f" ... and {len(ids) - max_tokens} tokens"
    row = example["source"]
    return f"row {row}, {len(targets)} of {len(ids)} tokens trained (marked): {text}"
