"""What a model sees of a rollout: padded rows, or groups packed behind one copy of their prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, takewhile
from typing import Any

import torch
from torch import Tensor

from ..ops.masking import length_mask, pad_ragged
from ..types import Rollout
from .packed_attention import KEYWORD, Group, Packing


@dataclass(frozen=True)
class Layout:
    """Inputs of a model, and where the log-probability of each completion token comes from.

    M is the number of distinct predictions; completions that begin alike share theirs. E is the
    number of completion tokens.
    """

    inputs: dict[str, Any]
    shape: tuple[int, int]  # (B, C)
    sources: Tensor  # (M,) places in the flattened hidden states that predict a token
    targets: Tensor  # (M,) the tokens
    slots: Tensor  # (E,) which of the M predictions a completion token is
    places: Tensor  # (E,) where it is in the flattened (B, C)

    @property
    def is_packed(self) -> bool:
        """Whether prompts are shared, in one row without padding."""
        return KEYWORD in self.inputs

    def scatter(self, values: Tensor) -> Tensor:
        """Bring predictions (M,) to completions (B, C); 0 beyond a completion's end."""
        # Padding is not read: the gradient of a place read so often would be a long serial sum.
        flat = values.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_copy(0, self.places, values[self.slots]).view(self.shape)


def plain_layout(
    batch: Rollout, pad_id: int, device: torch.device, multiple: int | None = None
) -> Layout:
    """Pad prompts on the left and completions on the right, one row for each completion.

    Args:
        batch (`Rollout`): B rows; only their token ids are read.
        pad_id (`int`): fills the padding; masked, so its value does not matter.
        device (`torch.device`): where the tensors go.
        multiple (`int`, *optional*): widths become a multiple of this.
    """
    prompts = pad_ragged(batch.prompt_ids, pad_id, side="left", multiple=multiple)
    columns = batch.loss_mask.shape[1]
    # One column at least, so that rows with empty completions still make a valid input.
    completions = pad_ragged(batch.completion_ids, pad_id, width=max(1, columns), multiple=multiple)
    lengths = torch.tensor([len(ids) for ids in batch.completion_ids])
    exists = length_mask(lengths, completions.shape[1])
    prompt_mask = length_mask(
        torch.tensor([len(ids) for ids in batch.prompt_ids]), prompts.shape[1]
    )
    attention = torch.cat([prompt_mask.flip(1), exists], 1).long()
    ids = torch.cat([prompts, completions], 1)
    rows, width = ids.shape
    firsts = torch.arange(rows)[:, None] * width + prompts.shape[1] - 1
    predictions = torch.arange(rows * completions.shape[1]).view(rows, -1)
    exists = exists[:, :columns]
    inputs = {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
    }
    return _on_device(
        Layout(
            inputs=inputs,
            shape=(rows, columns),
            sources=(firsts + torch.arange(completions.shape[1])).flatten(),
            targets=completions.flatten(),
            slots=predictions[:, :columns][exists],
            places=_marked(exists),
        ),
        device,
    )


def packed_layout(batch: Rollout, device: torch.device) -> Layout:
    """Put all rows behind each other without padding, each prompt once.

    The beginning that all completions of a prompt share is computed once as well. The last token
    of a completion predicts nothing, so it is left out.

    Args:
        batch (`Rollout`): B rows, those of a prompt next to each other.
        device (`torch.device`): where the tensors go.
    """
    groups = [_GroupRows.of(batch, rows) for rows in _same_prompt(batch.prompt_ids)]
    packing = Packing.of([group.lengths for group in groups], device)
    ids, positions = _tokens(groups)
    predictions = _Predictions.of(groups, packing)
    width = batch.loss_mask.shape[1]
    lengths = torch.tensor([len(ids) for ids in batch.completion_ids])
    layout = Layout(
        inputs=packed_inputs(torch.tensor([ids]), torch.tensor([positions]), packing),
        shape=(len(batch), width),
        # One prediction at least, so that rows with empty completions make a valid input.
        sources=torch.tensor(predictions.sources or [0]),
        targets=torch.tensor(predictions.targets or [0]),
        slots=torch.tensor(predictions.slots, dtype=torch.long),
        places=_marked(length_mask(lengths, width)),
    )
    return _on_device(layout, device)


def packed_inputs(ids: Tensor, positions: Tensor, layout: Any) -> dict[str, Any]:
    """Inputs of a model for tokens (R, S) whose attention follows a layout."""
    return {
        "input_ids": ids,
        "position_ids": positions,
        # A mask of four dimensions is handed on as it is; the attention reads the layout instead.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),
        KEYWORD: layout,
    }


@dataclass(frozen=True)
class _GroupRows:
    """What completions of one prompt share, and what each goes on with."""

    prompt: list[int]
    shared: list[int]
    completions: list[list[int]]

    @classmethod
    def of(cls, batch: Rollout, rows: Sequence[int]) -> _GroupRows:
        completions = [list(batch.completion_ids[row]) for row in rows]
        shared = common_prefix([ids[:-1] for ids in completions if ids])
        return cls(list(batch.prompt_ids[rows[0]]), shared, completions)

    @property
    def prefix(self) -> list[int]:
        return self.prompt + self.shared

    @property
    def tails(self) -> list[list[int]]:
        return [ids[len(self.shared) : -1] for ids in self.completions]

    @property
    def lengths(self) -> tuple[int, list[int]]:
        return len(self.prefix), [len(tail) for tail in self.tails]


def _tokens(groups: Sequence[_GroupRows]) -> tuple[list[int], list[int]]:
    """Ids and positions of all prefixes, then of all tails."""
    runs = [(group.prefix, 0) for group in groups]
    runs += [(tail, len(group.prefix)) for group in groups for tail in group.tails]
    ids: list[int] = []
    positions: list[int] = []
    for run, first in runs:
        ids += run
        positions += range(first, first + len(run))
    return ids, positions


@dataclass
class _Predictions:
    """Which place predicts which token, and which prediction each completion token is."""

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, groups: Sequence[_GroupRows], packing: Packing) -> _Predictions:
        found = cls()
        for group, places in zip(groups, packing.groups, strict=True):
            found.add(group, places)
        return found

    def add(self, group: _GroupRows, places: Group) -> None:
        """Add the predictions of a group that lies at `places`."""
        last, shared = places.prefix.stop - 1, len(group.shared)
        common = self._predict(range(last - shared, last), group.shared)
        start = places.tails.start
        for ids, tail in zip(group.completions, group.tails, strict=True):
            own = ids[shared:]
            sources = [last, *range(start, start + len(tail))][: len(own)]
            self.slots += common[: len(ids)] + self._predict(sources, own)
            start += len(tail)

    def _predict(self, sources: Sequence[int], targets: Sequence[int]) -> list[int]:
        start = len(self.sources)
        self.sources += sources
        self.targets += targets
        return list(range(start, start + len(targets)))


def common_prefix(rows: Sequence[Sequence[int]]) -> list[int]:
    """The longest beginning that all rows share."""
    # Between the first and the last row in order lie all others.
    ordered = sorted(map(list, rows))
    if not ordered:
        return []
    pairs = zip(ordered[0], ordered[-1], strict=False)
    return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _same_prompt(prompt_ids: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Runs of neighboring rows with the same prompt."""
    for _, rows in groupby(range(len(prompt_ids)), key=lambda i: list(prompt_ids[i])):
        yield list(rows)


def _marked(mask: Tensor) -> Tensor:
    """Places of the marked entries in a flattened mask."""
    return mask.flatten().nonzero()[:, 0]


def _on_device(layout: Layout, device: torch.device) -> Layout:
    """Copy what was made in main memory, and is read on the device alone, without waiting."""
    inputs = {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in layout.inputs.items()
    }
    names = ("sources", "targets", "slots", "places")
    moved = {name: getattr(layout, name).to(device, non_blocking=True) for name in names}
    return replace(layout, inputs=inputs, **moved)
