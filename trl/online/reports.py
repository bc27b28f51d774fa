"""What is reported of every round: metrics; completions in files, on a terminal, in trackers."""

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
        """Texts and log-probabilities, if they are asked for and the engine reported them."""
        found = self.generations
        if self.token_texts is None or found.sampling_logps is None:
            return {}
        logps = (_plain(round(x, 3)) for x in found.sampling_logps[row])
        texts = self.token_texts(found.completion_ids[row])
        return {"tokens": list(zip(texts, logps, strict=True))}


def _plain(value: float) -> float | None:
    return None if value != value else value  # JSON has no NaN


class Reports:
    """Collects the metrics of each mode; rank 0 appends to `folder/completions/<mode>.jsonl`."""

    def __init__(self, folder: str, ranks: Ranks, metrics: Mapping[Mode, MetricStore]):
        self._files = {x: JsonLinesFile(Path(folder, "completions", f"{x}.jsonl")) for x in metrics}
        self._metrics = metrics
        self._ranks = ranks
        self._latest: dict[Mode, list[dict[str, Any]]] = {}

    def add(self, mode: Mode, found: Round) -> int:
        """Record metrics of a round and write its completions; return its tokens on all ranks."""
        store = self._metrics[mode]
        lengths = found.generations.policy_token_counts()
        stopped = [reason == "stop" for reason in found.generations.finish_reasons]
        rows = zip(lengths, stopped, map(len, found.prompts.token_ids), strict=True)
        counts = self._ranks.gather(torch.tensor(list(map(list, rows)))).cpu()
        record_lengths(store, counts[:, 0], counts[:, 1].bool())
        record_rewards(store, found.table)
        record_tools(store, found.generations.tool_call_counts)
        ranks = self._ranks.gather_objects_on_rank_0(found.records(self._ranks.rank))
        if self._ranks.rank == 0:
            self._latest[mode] = [record for records in ranks for record in records]
            self._files[mode].add(self._latest[mode])
        return int(counts[:, 0].sum() + counts[:, 2].sum())

    def take(self, mode: Mode) -> list[dict[str, Any]]:
        """Return the records of the latest round not yet taken; none on ranks other than 0."""
        return self._latest.pop(mode, [])

    def restart(self, step: int) -> None:
        """Drop what a run that went further than `step` wrote, so no completion is there twice."""
        if self._ranks.rank == 0:
            # The evaluation of a step comes before its checkpoint, its training rounds after.
            self._files["train"].drop_after(step - 1)
            self._files["eval"].drop_after(step)


def print_table(records: list[dict[str, Any]], step: int, count: int | None) -> None:
    """Print records with their rewards, `count` of them drawn at random, if rich is installed."""
    if count is not None and count < len(records):
        chosen = random.Random(step).sample(range(len(records)), max(count, 0))
        records = [records[i] for i in sorted(chosen)]
    if not records or not is_available("rich"):
        return
    names = ("rich.table", "rich.text", "rich.console")
    table, text, console = (require(name, "log_completions") for name in names)
    shown = table.Table(title=f"Step {step}", show_lines=True, expand=True)
    columns, rows = tracker_rows(records, unique_prompts=False)
    for name in columns[1:]:
        shown.add_column(name, overflow="fold")
    for _, prompt, completion, *values in rows:
        shown.add_row(text.Text(prompt), text.Text(completion), *map(_cell, values))
    console.Console().print(shown)


def _cell(value: Any) -> str:
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
    """Send a table `completions` to the running ones of wandb and trackio in `report_to`."""
    if not rows:
        return
    running = {name: sys.modules.get(name) for name in ("wandb", "trackio") if name in report_to}
    if (wandb := running.get("wandb")) and wandb.run is not None:
        plain = (type(None), int, float, str)
        cells = [[x if isinstance(x, plain) else str(x) for x in row] for row in rows]
        wandb.log({"completions": wandb.Table(columns=columns, data=cells)})
    if (trackio := running.get("trackio")) and trackio.context_vars.current_run.get() is not None:
        trackio.log({"completions": trackio.Table(columns=columns, data=rows)})
