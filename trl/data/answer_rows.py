"""Prompts with the answers that share them: items of a dataset, and rows of a micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..ops.masking import pad_ragged
from ..types import TokenRows
from .preference_rows import PreferenceLimits, cut_preferences, preference_lengths
from .rows import StepRows


@dataclass(frozen=True, slots=True)
class AnswerGroup:
    """A prompt, and K answers that are scored behind it."""

    prompt_ids: list[int]
    answer_ids: list[list[int]]  # K
    source: int  # row of the dataset it is made from
    values: dict[str, Any] = field(default_factory=dict)  # numbers that are known of it
    counts: bool = True  # False: it only keeps a rank busy

    def uncounted(self) -> AnswerGroup:
        """The same group, which only keeps a rank busy."""
        return dataclasses.replace(self, counts=False)

    def tokens(self) -> int:
        """Tokens a model sees, the prompt's once."""
        return len(self.prompt_ids) + sum(map(len, self.answer_ids))


def answer_group(row: dict[str, Any], limits: PreferenceLimits) -> AnswerGroup:
    """Make an item of a row of `prepare_preferences`."""
    prompt, answers = limits.cut(row["prompt_ids"], row["answers_ids"])
    known = {name: row[name] for name in ("margin", "label", "ranks") if row[name] is not None}
    return AnswerGroup(prompt, answers, row["source"], known)


class AnswerDataset:
    """Prepared preferences, cut to length; tokens stay on disk until they are asked for.

    Attributes:
        lengths: (items,) tokens a model sees of each, the prompt's once.
        report (`CutReport`): counts.
        rows (`Dataset`): what is left of `table`.
        values: (items, ...) arrays by name, that items get besides what their rows know.

    Raises:
        ValueError: if no example is left.
    """

    def __init__(self, table: Dataset, limits: PreferenceLimits):
        self.rows, self.report = cut_preferences(table, limits)
        self.report.warn(str(limits))
        prompts, answers = limits.lengths(*preference_lengths(self.rows))
        self.lengths = prompts + answers.sum(axis=1)
        self.values: dict[str, np.ndarray] = {}
        self.limits = limits

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> AnswerGroup:
        """Make an item; a negative place gives one that does not count (see `RankBatches`)."""
        at = place if place >= 0 else ~place
        found = answer_group(self.rows[at], self.limits)
        added = {name: values[at].tolist() for name, values in self.values.items()}
        found = dataclasses.replace(found, values=found.values | added)
        return found if place >= 0 else found.uncounted()


@dataclass(frozen=True, kw_only=True)
class AnswerRows(StepRows):
    """A micro-batch of B prompts, each with K answers or fewer; `flat` has a row for each answer.

    `values` holds (B, ...) tensors: "counts" (B,) bool, "lengths" (B, K) tokens of answers that
    something predicts, and what is known of items, such as "label", "margin" or "ref_logps".
    """

    groups: list[AnswerGroup]
    values: dict[str, Tensor]

    @classmethod
    def of(cls, groups: Sequence[AnswerGroup]) -> Self:
        """Make rows of items of one dataset."""
        names = groups[0].values
        values = {name: _column([group.values[name] for group in groups]) for name in names}
        lengths = [[len(ids) - (not g.prompt_ids) for ids in g.answer_ids] for g in groups]
        values["lengths"] = pad_ragged(lengths, 0)
        values["counts"] = torch.tensor([group.counts for group in groups])
        return cls(groups=list(groups), values=values)

    def __len__(self) -> int:
        return len(self.groups)

    @cached_property
    def flat(self) -> TokenRows:
        """The rows a scorer reads: the answers of a prompt next to each other."""
        pairs = [(group, ids) for group in self.groups for ids in group.answer_ids]
        return TokenRows(
            prompt_ids=[group.prompt_ids for group, _ in pairs],
            completion_ids=[ids for _, ids in pairs],
            row_ids=[group.source for group, _ in pairs],
        )

    def tokens(self) -> int:
        """Tokens of the groups that count, prompts once."""
        return sum(group.tokens() for group in self.groups if group.counts)

    def weight(self) -> Tensor:
        """Groups that count (1,)."""
        return self.values["counts"].sum()[None]

    def by_group(self, flat: Tensor) -> Tensor:
        """Bring values of the rows of `flat` (F, ...) to groups: (B, K, ...), 0 beyond the last."""
        sizes = [len(group.answer_ids) for group in self.groups]
        return pad_sequence(list(flat.split(sizes)), batch_first=True)

    def token_mask(self) -> Tensor:
        """Tokens of answers that count, (F, C) for the rows of `flat`."""
        exists = [[group.counts] * len(ids) for group in self.groups for ids in group.answer_ids]
        return pad_ragged(exists, False).to(self.values["counts"].device, non_blocking=True)

    def with_values(self, **values: Tensor) -> Self:
        """Add (B, ...) tensors."""
        return dataclasses.replace(self, values=self.values | values)

    def to(self, device: torch.device) -> Self:
        """Copy to a device what is a tensor."""
        moved = {name: x.to(device, non_blocking=True) for name, x in self.values.items()}
        return dataclasses.replace(self, values=moved)

    def select(self, index: Sequence[int]) -> Self:
        """Return the given groups."""
        groups = [self.groups[i] for i in index]
        return dataclasses.replace(
            self, groups=groups, values={name: x[list(index)] for name, x in self.values.items()}
        )


def _column(found: list[Any]) -> Tensor:
    """Numbers (B,), or lists of them (B, longest), filled with 0."""
    columns = [torch.tensor(value) for value in found]
    has_lists = columns[0].dim() > 0
    return pad_sequence(columns, batch_first=True) if has_lists else torch.stack(columns)
