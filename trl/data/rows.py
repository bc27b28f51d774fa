"""Rows to train on: tokens, and which of them count, as a scorer reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .supervised import IGNORED


@dataclass(frozen=True, slots=True)
class Document:
    """One row of supervised fine-tuning."""

    ids: np.ndarray  # (T,) int32
    trained: np.ndarray  # (T,) bool; the first token is never predicted, so never trained
    source: int  # row of the dataset it is made from

    @property
    def labels(self) -> np.ndarray:
        """The tokens, and -100 where they are not trained (T,)."""
        return np.where(self.trained, self.ids, IGNORED)


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisedRows:
    """A micro-batch of documents: B rows, C tokens of the longest completion.

    A prompt is what stands before the first trained token, and a completion ends with the last
    one: tokens after it are computed for nothing.
    """

    prompt_ids: list[list[int]]  # B ragged, none empty
    completion_ids: list[list[int]]  # B ragged
    row_ids: list[int]  # B: row of the dataset
    loss_mask: Tensor  # (B, C) bool
    weights: Tensor | None = None  # (B, C) of the tokens in the loss; None means 1

    @classmethod
    def of(cls, documents: Sequence[Document]) -> SupervisedRows:
        """Make rows of documents, each with at least one trained token."""
        parts = []
        for document in documents:
            trained = np.flatnonzero(document.trained)
            parts.append((int(trained[0]), int(trained[-1]) + 1))
        mask = torch.zeros(len(parts), max(b - a for a, b in parts), dtype=torch.bool)
        for row, ((first, stop), document) in enumerate(zip(parts, documents, strict=True)):
            mask[row, : stop - first] = torch.from_numpy(document.trained[first:stop].copy())
        pairs = list(zip(documents, parts, strict=True))
        return cls(
            prompt_ids=[d.ids[:first].tolist() for d, (first, _) in pairs],
            completion_ids=[d.ids[first:stop].tolist() for d, (first, stop) in pairs],
            row_ids=[d.source for d in documents],
            loss_mask=mask,
        )

    def __len__(self) -> int:
        return len(self.completion_ids)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens in the loss: as many as there are log-probabilities to sum."""
        return int(self.loss_mask.sum())

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
            weights=None if self.weights is None else self.weights[rows, :width],
        )
