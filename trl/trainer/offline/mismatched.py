"""Answers that are also scored under the prompts of other examples, for KTO's KL estimate."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any

from ...data.answer_rows import AnswerDataset, AnswerGroup
from ...data.preference_rows import PreferenceLimits, mismatched
from .batches import ItemStream

LOOKED_BACK = 64  # items of a stream among which a partner is looked for


class MismatchedDataset:
    """Answers with a label, each with another example's answer behind it (see `mismatched`)."""

    def __init__(self, answers: AnswerDataset, seed: int):
        self._answers, self.rows, self.values = answers, answers.rows, answers.values
        sources, ids = answers.rows["source"][:], [own for (own,) in answers.rows["answers_ids"]]
        self.partners = mismatched(sources, ids, seed)
        lengths = answers.lengths
        self.lengths = lengths + [len(ids[i]) for i in self.partners]

    def __len__(self) -> int:
        return len(self._answers)

    def __getitem__(self, place: int) -> AnswerGroup:
        """Make an item; see `AnswerDataset`."""
        at = place if place >= 0 else ~place
        other = self._answers[int(self.partners[at])]
        return with_mismatched(self._answers[place], other, self._answers.limits)


class MismatchedStream(ItemStream):
    """The same of a stream: an item's partner is the last one before it that fits."""

    def __init__(self, items: ItemStream, limits: PreferenceLimits):
        super().__init__(items.rows, items.unpack, items.size)
        self._limits = limits

    def __iter__(self) -> Iterator[AnswerGroup]:
        recent: deque[AnswerGroup] = deque(maxlen=LOOKED_BACK)
        waiting: list[AnswerGroup] = []  # until the first one comes that fits
        for item in super().__iter__():
            yield from (
                with_mismatched(one, item, self._limits) for one in waiting if _fits(one, item)
            )
            waiting = [one for one in waiting if not _fits(one, item)]
            partner = next((one for one in reversed(recent) if _fits(item, one)), None)
            if partner is None:
                waiting.append(item)
            else:
                yield with_mismatched(item, partner, self._limits)
            recent.append(item)
        if waiting:
            raise ValueError(
                f"Row {waiting[0].source} of the stream has no partner: the KL estimate needs rows "
                "of other examples with other completions."
            )


def _fits(item: AnswerGroup, other: AnswerGroup) -> bool:
    return item.source != other.source and item.answer_ids != other.answer_ids


def with_mismatched(item: AnswerGroup, other: AnswerGroup, limits: PreferenceLimits) -> AnswerGroup:
    """Put the answer of another item behind that of an item, cut to the room that there is."""
    room: Any = None
    if limits.max_length is not None:
        room = max(limits.max_length - len(item.prompt_ids), 1)
    return dataclasses.replace(item, answer_ids=[*item.answer_ids, other.answer_ids[0][:room]])
