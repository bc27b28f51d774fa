"""Items of prepared datasets, and the rows of a micro-batch that are made of them."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..ops.masking import pad_ragged
from ..types import Mode, Prefix, Rows
from .examples import IGNORED, Example, make_group, ranks_of, reference_logps


@dataclass(frozen=True, slots=True)
class AnswerGroup:
    """A prompt, and K answers that are scored after it."""

    prompt_ids: list[int]
    answer_ids: list[list[int]]  # K
    source: int  # row of the dataset it is made from
    values: dict[str, Any] = field(default_factory=dict)  # what is known of it besides
    counts: bool = True  # False: it only keeps a rank busy
    origin: str = ""
    labels: list[int] = field(default_factory=list)  # of a document, -100 for its first token

    def tokens(self) -> int:
        """Tokens a model sees, the prompt's once."""
        return len(self.prompt_ids) + sum(map(len, self.answer_ids))


def item_of(example: Example) -> AnswerGroup:
    """Make an item of an example."""
    group = make_group(example)
    values: dict[str, Any] = {}
    if "labels" in example:
        values["loss_mask"] = group.branches[0].loss_mask
    elif "label" in example:
        values["label"] = example["label"]
    else:
        values |= {"margin": example["margin"], "ranks": ranks_of(example)}
    if any(name.startswith("ref_") for name in example):
        values["ref_logps"] = reference_logps(example)
    return AnswerGroup(
        prompt_ids=list(group.prefix.ids),
        answer_ids=[list(branch.ids) for branch in group.branches],
        source=group.row,
        values=values,
        counts=not group.is_filler,
        origin=group.origin,
        labels=[IGNORED, *example["labels"][1:]] if "labels" in example else [],
    )


@dataclass(frozen=True, kw_only=True)
class AnswerRows:
    """A micro-batch of B prompts, each with K answers or fewer; `flat` has a row for each answer.

    `values`: "counts" (B,) bool, "lengths" (B, K) tokens of answers that something predicts, and
    what is known of items, such as "label", "margin", "ref_logps" or "loss_mask".
    """

    items: list[Any]
    values: dict[str, Tensor]  # (B, ...)
    mode: Mode = "train"
    totals: Tensor | None = None  # (k,) what the losses of the optimizer step are divided by
    num_micro_batches: int = 1  # micro-batches of the step on this rank
    num_micro_batch_rows: int | None = None  # rows of the whole micro-batch

    @classmethod
    def of(cls, examples: Sequence[Any]) -> Self:
        """Make rows of examples of one dataset, documents or groups of answers."""
        items = [x if isinstance(x, AnswerGroup) else item_of(x) for x in examples]
        values = {name: _column([item.values[name] for item in items]) for name in items[0].values}
        lengths = [[len(ids) - (not g.prompt_ids) for ids in g.answer_ids] for g in items]
        values["lengths"] = pad_ragged(lengths, 0)
        values["counts"] = torch.tensor([item.counts for item in items])
        return cls(items=list(items), values=values)

    def __len__(self) -> int:
        return len(self.items)

    @cached_property
    def flat(self) -> Rows:
        """The rows a scorer reads: the answers of a prompt next to each other."""
        prefixes = [Prefix(item.prompt_ids) for item in self.items]
        rows = [
            (prefix, ids, item.source)
            for prefix, item in zip(prefixes, self.items, strict=True)
            for ids in item.answer_ids
        ]
        return Rows(
            prefixes=[prefix for prefix, _, _ in rows],
            completion_ids=[ids for _, ids, _ in rows],
            row_ids=[source for _, _, source in rows],
        )

    def unit_tokens(self) -> list[int]:
        """Tokens of what is never cut: of each prompt with its answers."""
        return [item.tokens() for item in self.items]

    def tokens_per_unit(self) -> list[int]:
        """Tokens of what is never cut, see `unit_tokens`."""
        return self.unit_tokens()

    def select_units(self, units: range) -> Self:
        """Return consecutive items."""
        return self if len(units) == len(self) else self.select(units)

    def tokens(self) -> int:
        """Tokens of the items that count, prompts once."""
        return sum(item.tokens() for item in self.items if item.counts)

    def of_step(self, totals: Tensor, num_micro_batches: int, mode: Mode) -> Self:
        """Say what the losses of all micro-batches of an optimizer step are divided by."""
        changes = {"totals": totals, "num_micro_batches": num_micro_batches, "mode": mode}
        return dataclasses.replace(self, **changes, num_micro_batch_rows=len(self))

    @property
    def share_of_micro_batch(self) -> float:
        """Rows at hand, as a share of those of the micro-batch."""
        return len(self) / (self.num_micro_batch_rows or len(self))

    def to(self, device: torch.device) -> Self:
        moved = {name: x.to(device, non_blocking=True) for name, x in self.values.items()}
        return dataclasses.replace(self, values=moved)

    def select(self, index: Sequence[int]) -> Self:
        """Return the given items."""
        rows = torch.tensor(list(index), dtype=torch.long)
        values = {n: x[rows.to(x.device, non_blocking=True)] for n, x in self.values.items()}
        return dataclasses.replace(self, items=[self.items[i] for i in index], values=values)

    def by_group(self, flat: Tensor) -> Tensor:
        """Bring values of the rows of `flat` (F, ...) to groups: (B, K, ...), 0 beyond the last.

        K is that of `values`: these rows may be a part of a micro-batch, without its longest group.
        """
        sizes = [len(group.answer_ids) for group in self.items]
        groups = pad_sequence(list(flat.split(sizes)), batch_first=True)
        missing = self.values["lengths"].shape[1] - groups.shape[1]
        return torch.cat([groups, groups.new_zeros(len(groups), missing, *groups.shape[2:])], dim=1)

    def token_mask(self) -> Tensor:
        """Tokens of answers that count, (F, C) for the rows of `flat`."""
        exists = [[group.counts] * len(ids) for group in self.items for ids in group.answer_ids]
        return pad_ragged(exists, False).to(self.values["counts"].device, non_blocking=True)

    def with_values(self, **values: Tensor) -> Self:
        """Add (B, ...) tensors."""
        return dataclasses.replace(self, values=self.values | values)


class SupervisedRows(AnswerRows):
    """A micro-batch of documents, each with a trained token; C tokens of the longest completion."""

    def unit_tokens(self) -> list[int]:
        """Tokens of each document; documents with the same prompt may share it."""
        return self.flat.unit_tokens()

    @property
    def loss_mask(self) -> Tensor:
        """Tokens in the loss (B, C)."""
        trained = self.values["loss_mask"] & self.values["counts"][:, None]
        return trained[:, : max(map(len, self.flat.completion_ids), default=0)]


def _column(found: list[Any]) -> Tensor:
    """Numbers (B,), or lists of them (B, longest), filled with 0."""
    columns = [torch.tensor(value) for value in found]
    has_lists = columns[0].dim() > 0
    return pad_sequence(columns, batch_first=True) if has_lists else torch.stack(columns)
