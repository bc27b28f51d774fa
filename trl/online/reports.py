"""What is told of every round: metrics of all ranks, and the completions in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..distributed import Ranks
from ..types import Generations, Mode, Prompts, RewardTable
from .completions import CompletionLog, plain
from .metrics import MetricStore
from .statistics import record_lengths, record_rewards, record_tools


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round of completions with its rewards: B rows of this rank, N rows of all ranks."""

    step: int  # optimizer steps done when it was generated
    number: int  # of the round within the step
    prompts: Prompts  # B
    completions: list[Any]  # B: strings, or lists of messages
    generations: Generations  # B
    table: RewardTable  # N
    extras: dict[str, list[Any]]  # columns that reward functions added, B values each
    advantages: Tensor  # (N,)

    def records(self, rank: int) -> list[dict[str, Any]]:
        """Return one JSON-ready record for each completion of rank `rank`; NaN becomes None."""
        ids = self.generations.completion_ids
        first = rank * len(ids)
        here = slice(first, first + len(ids))
        scores = self.table.per_function[here].tolist()
        totals = self.table.total[here].tolist()
        advantages = self.advantages[here].tolist()
        return [
            {
                "step": self.step,
                "round": self.number,
                "group": (first + row) // self.table.group_size,
                "prompt": self.prompts.messages[row],
                "completion": self.completions[row],
                "completion_ids": ids[row],
                "finish": self.generations.finish[row],
                "reward": plain(totals[row]),
                "advantage": plain(advantages[row]),
                "rewards": dict(zip(self.table.names, map(plain, scores[row]), strict=True)),
                "extra": {name: values[row] for name, values in self.extras.items()},
            }
            for row in range(len(ids))
        ]


class Reports:
    """Collects the metrics of each mode, and writes the completions of all ranks.

    Args:
        completions (`CompletionLog`): where the completions go.
        ranks (`Ranks`): all processes, which call every method together.
        metrics (`dict[str, MetricStore]`): where those of "train" and of "eval" go.
    """

    def __init__(
        self, completions: CompletionLog, ranks: Ranks, metrics: Mapping[Mode, MetricStore]
    ):
        self.completions = completions
        self._metrics = metrics
        self._ranks = ranks

    def add(self, mode: Mode, found: Round) -> int:
        """Record the metrics of a round and write its completions.

        Returns:
            `int`: tokens of prompts and completions of all ranks that the policy wrote or read.
        """
        store = self._metrics[mode]
        tokens = self._count_tokens(store, found)
        record_rewards(store, found.table)
        record_tools(store, found.generations.tool_calls)
        ranks = self._ranks.objects_on_first(found.records(self._ranks.rank))
        self.completions.add(mode, [record for records in ranks for record in records])
        return tokens

    def _count_tokens(self, store: MetricStore, found: Round) -> int:
        lengths = found.generations.trained_lengths()
        stopped = [reason == "stop" for reason in found.generations.finish]
        rows = zip(lengths, stopped, map(len, found.prompts.token_ids), strict=True)
        counts = self._ranks.gather(torch.tensor(list(map(list, rows)))).cpu()
        record_lengths(store, counts[:, 0], counts[:, 1].bool())
        return int(counts[:, 0].sum() + counts[:, 2].sum())
