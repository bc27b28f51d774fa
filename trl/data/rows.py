"""Rows to train on: tokens, and which of them count, as a scorer reads them."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..types import Mode


@dataclass(frozen=True, slots=True)
class Document:
    """One row of supervised fine-tuning."""

    ids: np.ndarray  # (T,) int32
    trained: np.ndarray  # (T,) bool; the first token is never predicted, so never trained
    source: int  # row of the dataset it is made from
    counts: bool = True  # False: it only keeps a rank busy
    origin: str = ""  # the dataset of a mixture that the row is from, if it has a name

    @classmethod
    def filler(cls, source: int) -> Document:
        """A document that does not count."""
        ids, trained = np.zeros(2, dtype=np.int32), np.array([False, True])
        return cls(ids=ids, trained=trained, source=source, counts=False)

    def uncounted(self) -> Document:
        """The same document, which only keeps a rank busy."""
        return dataclasses.replace(self, counts=False)


def shown(document: Document, tokenizer: PreTrainedTokenizerBase, tokens: int = 200) -> str:
    """Write the first tokens of a document, the trained ones green, or in brackets."""
    opening, closing = ("\x1b[32m", "\x1b[0m") if sys.stdout.isatty() else ("\u27ea", "\u27eb")
    trained = document.trained[:tokens]
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(trained)]
    text = ""
    for start, stop in itertools.pairwise(edges):
        piece = tokenizer.decode(document.ids[start:stop].tolist())
        text += f"{opening}{piece}{closing}" if trained[start] else piece
    more = len(document.ids) - len(trained)
    count = int(document.trained.sum())
    return (
        f"row {document.source}, {count} of {len(document.ids)} tokens trained (marked): {text}"
        + f" ... and {more} tokens" * bool(more)
    )


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """A micro-batch, and what it knows of the optimizer step that it is a part of.

    It is cut by what a loss has terms of: documents, or prompts with their answers.
    """

    mode: Mode = "train"
    totals: Tensor | None = None  # (k,) what the losses of the optimizer step are divided by
    num_micro_batches: int = 1  # micro-batches of the step on this rank
    num_micro_batch_rows: int | None = None  # rows of the whole micro-batch

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def flat(self) -> Any:
        """The rows a scorer reads."""
        return self

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row that a scorer reads."""
        flat = self.flat
        pairs = zip(flat.prompt_ids, flat.completion_ids, strict=True)
        return [len(prompt) + len(completion) for prompt, completion in pairs]

    def of_step(self, totals: Tensor, num_micro_batches: int, mode: Mode) -> Self:
        """Say what the losses of all micro-batches of an optimizer step are divided by."""
        changes = {"totals": totals, "num_micro_batches": num_micro_batches, "mode": mode}
        return dataclasses.replace(self, **changes, num_micro_batch_rows=len(self))

    @property
    def share_of_micro_batch(self) -> float:
        """Rows at hand, as a share of those of the micro-batch."""
        return len(self) / (self.num_micro_batch_rows or len(self))


@dataclass(frozen=True, kw_only=True)
class SupervisedRows(StepRows):
    """A micro-batch of documents: B rows, C tokens of the longest completion.

    A prompt is what stands before the first trained token, and a completion ends with the last
    one: tokens after it are computed for nothing.
    """

    prompt_ids: list[list[int]]  # B ragged, none empty
    completion_ids: list[list[int]]  # B ragged
    row_ids: list[int]  # B: row of the dataset
    loss_mask: Tensor  # (B, C) bool
    origins: Sequence[str] = ()  # B: the dataset of a mixture that each row is from

    @classmethod
    def of(cls, documents: Sequence[Document]) -> SupervisedRows:
        """Make rows of documents, each with at least one trained token."""
        parts = []
        for document in documents:
            trained = np.flatnonzero(document.trained)
            parts.append((int(trained[0]), int(trained[-1]) + 1))
        mask = torch.zeros(len(parts), max(b - a for a, b in parts), dtype=torch.bool)
        for row, ((first, stop), document) in enumerate(zip(parts, documents, strict=True)):
            if document.counts:
                mask[row, : stop - first] = torch.from_numpy(document.trained[first:stop].copy())
        pairs = list(zip(documents, parts, strict=True))
        return cls(
            prompt_ids=[d.ids[:first].tolist() for d, (first, _) in pairs],
            completion_ids=[d.ids[first:stop].tolist() for d, (first, stop) in pairs],
            row_ids=[d.source for d in documents],
            loss_mask=mask,
            origins=[d.origin for d in documents],
        )

    def __len__(self) -> int:
        return len(self.completion_ids)

    def by_origin(self) -> Iterator[tuple[str, Tensor]]:
        """The names of datasets that rows are from, and the tokens in the loss of each (B, C)."""
        for name in sorted(filter(None, set(self.origins))):
            rows = torch.tensor([[origin == name] for origin in self.origins])
            yield name, self.loss_mask & rows.to(self.loss_mask.device, non_blocking=True)

    def weight(self) -> Tensor:
        """Tokens in the loss (1,): as many as there are log-probabilities to sum."""
        return self.loss_mask.sum()[None]

    def tokens(self) -> int:
        """All tokens of the rows that count."""
        counted = self.loss_mask.any(1).tolist()
        return sum(size for size, counts in zip(self.lengths, counted, strict=True) if counts)

    def to(self, device: torch.device) -> SupervisedRows:
        """Copy to a device what is a tensor."""
        return dataclasses.replace(self, loss_mask=self.loss_mask.to(device, non_blocking=True))

    def select(self, index: Sequence[int]) -> SupervisedRows:
        """Return the given rows, with (B, C) fields cut to the longest completion left."""
        width = max((len(self.completion_ids[i]) for i in index), default=0)
        rows = torch.tensor(list(index), dtype=torch.long, device=self.loss_mask.device)
        return dataclasses.replace(
            self,
            prompt_ids=[self.prompt_ids[i] for i in index],
            completion_ids=[self.completion_ids[i] for i in index],
            row_ids=[self.row_ids[i] for i in index],
            loss_mask=self.loss_mask[rows, :width],
            origins=[self.origins[i] for i in index],
        )
