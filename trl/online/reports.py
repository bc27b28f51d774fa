"""Reports of every round: metrics, and completions in files, on a terminal and in trackers."""

import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..distributed import Ranks
from ..imports import is_available, require
from ..json_files import JsonLinesFile, json_values
from ..number_format import format_fixed
from ..transcripts import transcript
from ..types import Mode, Prompts, RewardTable
from .metrics import MetricStore, record_lengths, record_rewards, record_tools

if TYPE_CHECKING:
    from ..generation.base import Generations


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round of completions with its rewards: B rows of this rank, N rows of all ranks."""

    step: int  # optimizer steps done when it was generated
    number: int  # of the round within the step
    prompts: Prompts  # B
    completions: list[Any]  # B: strings, or lists of messages
    generations: "Generations"  # B
    table: RewardTable  # N
    extras: dict[str, list[Any]]  # columns that reward functions added, B values each
    advantages: Tensor  # (N,)
    token_texts: Callable[[Sequence[int]], list[str]] | None = None  # of tokens to be recorded

    def records(self, rank: int) -> list[dict[str, Any]]:
        """Return one JSON-ready record for each completion of rank `rank`; NaN becomes None."""
        ids = self.generations.completion_ids
        first = rank * len(ids)
        own_rows = slice(first, first + len(ids))
        scores = self.table.per_function[own_rows].tolist()
        totals = self.table.total[own_rows].tolist()
        advantages = self.advantages[own_rows].tolist()
        return [
            {
                "step": self.step,
                "round": self.number,
                "group": (first + row) // self.table.group_size,
                "prompt": self.prompts.messages[row],
                "completion": self.completions[row],
                "completion_ids": ids[row],
                "finish": self.generations.finish_reasons[row],
                "reward": _plain(totals[row]),
                "advantage": _plain(advantages[row]),
                "rewards": dict(zip(self.table.names, map(_plain, scores[row]), strict=True)),
                "extra": {name: json_values(x[row]) for name, x in self.extras.items()},
            }
            | self._tokens(row)
            for row in range(len(ids))
        ]

    def _tokens(self, row: int) -> dict[str, Any]:
        """Return texts and log-probabilities of tokens, if requested and reported by the engine."""
        generations = self.generations
        if self.token_texts is None or generations.sampling_logps is None:
            return {}
        logps = (_plain(round(logp, 3)) for logp in generations.sampling_logps[row])
        texts = self.token_texts(generations.completion_ids[row])
        return {"tokens": list(zip(texts, logps, strict=True))}


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value  # JSON has no NaN


class Reports:
    """Collects the metrics of each mode; rank 0 appends to `folder/completions/<mode>.jsonl`."""

    def __init__(self, folder: str, ranks: Ranks, metrics: Mapping[Mode, MetricStore]):
        self._files = {
            mode: JsonLinesFile(Path(folder, "completions", f"{mode}.jsonl")) for mode in metrics
        }
        self._metrics = metrics
        self._ranks = ranks
        self._latest: dict[Mode, list[dict[str, Any]]] = {}

    def add(self, mode: Mode, completed: Round) -> int:
        """Record the metrics of a round and write its completions; all ranks call this.

        Returns the number of tokens of prompts and completions of all ranks.
        """
        store = self._metrics[mode]
        generations = completed.generations
        rows = zip(
            generations.policy_token_counts(),
            [reason == "stop" for reason in generations.finish_reasons],
            map(len, completed.prompts.token_ids),
            strict=True,
        )
        local = torch.tensor([list(row) for row in rows])
        lengths, stopped, prompt_lengths = self._ranks.gather(local).cpu().unbind(1)
        record_lengths(store, lengths, stopped.bool())
        record_rewards(store, completed.table)
        record_tools(store, generations.tool_call_counts)
        all_ranks = self._ranks.gather_objects_on_rank_0(completed.records(self._ranks.rank))
        if self._ranks.rank == 0:
            self._latest[mode] = [record for records in all_ranks for record in records]
            self._files[mode].add(self._latest[mode])
        return int(lengths.sum() + prompt_lengths.sum())

    def take(self, mode: Mode) -> list[dict[str, Any]]:
        """Return the records of the latest round not yet taken; none on ranks other than 0."""
        return self._latest.pop(mode, [])

    def restart(self, step: int) -> None:
        """Drop the records after `step`, which a resumed run writes again."""
        if self._ranks.rank == 0:
            # The evaluation of a step is written before its checkpoint, its training rounds after.
            self._files["train"].drop_after(step - 1)
            self._files["eval"].drop_after(step)


def print_table(records: list[dict[str, Any]], step: int, count: int | None) -> None:
    """Print records with their rewards if rich is installed: all, or `count` random ones."""
    if count is not None and count < len(records):
        chosen = random.Random(step).sample(range(len(records)), max(count, 0))
        records = [records[i] for i in sorted(chosen)]
    if not records or not is_available("rich"):
        return
    names = ("rich.table", "rich.text", "rich.console")
    table, text, console = (require(name, "log_completions") for name in names)
    printed = table.Table(title=f"Step {step}", show_lines=True, expand=True)
    columns, rows = tracker_rows(records, unique_prompts=False)
    for name in columns[1:]:
        printed.add_column(name, overflow="fold")
    for _, prompt, completion, *values in rows:
        printed.add_row(text.Text(prompt), text.Text(completion), *map(_cell, values))
    console.Console().print(printed)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return format_fixed(value, 2) if isinstance(value, float) else str(value)


def tracker_rows(
    records: list[dict[str, Any]], unique_prompts: bool
) -> tuple[list[str], list[list[Any]]]:
    """Lay out records for a tracker's table: column names, and one list per row."""
    if not records:
        return [], []
    if unique_prompts:
        first = {transcript(record["prompt"]): record for record in records[::-1]}
        records = list(first.values())[::-1]
    names = [*records[0]["rewards"], *records[0]["extra"]]
    rows = []
    for record in records:
        texts = transcript(record["prompt"]), transcript(record["completion"])
        values = map((record["rewards"] | record["extra"]).get, names)
        rows.append([record["step"], *texts, *values, record["advantage"]])
    return ["step", "prompt", "completion", *names, "advantage"], rows


def log_table(report_to: list[str], columns: list[str], rows: list[list[Any]]) -> None:
    """Send a table `completions` to wandb and trackio, if `report_to` has them and they run."""
    if not rows:
        return
    running = {name: sys.modules.get(name) for name in ("wandb", "trackio") if name in report_to}
    if (wandb := running.get("wandb")) and wandb.run is not None:
        plain = (type(None), int, float, str)
        cells = [[x if isinstance(x, plain) else str(x) for x in row] for row in rows]
        wandb.log({"completions": wandb.Table(columns=columns, data=cells)})
    if (trackio := running.get("trackio")) and trackio.context_vars.current_run.get() is not None:
        trackio.log({"completions": trackio.Table(columns=columns, data=rows)})
