"""What the policy wrote: every completion as a JSON line, and a table of the latest ones."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from ..imports import is_available, require
from ..text import as_text


def plain(value: float) -> float | None:
    """Return the number, or None for NaN, which JSON does not have."""
    return None if value != value else value


class CompletionLog:
    """Appends records to `<folder>/completions/<mode>.jsonl` and shows the latest round.

    Args:
        folder (`str`): the run's output folder.
        writes (`bool`): whether this process writes; the others only take part in gathers.
    """

    def __init__(self, folder: str, writes: bool):
        self._folder = Path(folder) / "completions"
        self._writes = writes
        self._latest: dict[str, list[dict[str, Any]]] = {}

    def add(self, mode: str, records: list[dict[str, Any]]) -> None:
        """Write the records of one round, already gathered in row order."""
        if not self._writes:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"{mode}.jsonl").open("a", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
        self._latest[mode] = records

    def restart(self, step: int) -> None:
        """Drop what a run that went further than `step` wrote, so no completion stands twice."""
        if not self._writes:
            return
        for path in self._folder.glob("*.jsonl"):
            # The evaluation of a step comes before its checkpoint, its training rounds after.
            last = step + 1 if path.stem == "eval" else step
            kept = path.with_suffix(".kept")  # the file is whole at any instant
            with path.open(encoding="utf-8") as old, kept.open("w", encoding="utf-8") as new:
                # Iteration splits where splitlines would not: at \n alone.
                new.writelines(line for line in old if _step_of(line) < last)
            kept.replace(path)

    def take(self, mode: str) -> list[dict[str, Any]]:
        """Return the records of the latest round not yet taken."""
        return self._latest.pop(mode, [])


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except ValueError:  # a line cut off by a crash
        return float("inf")


def print_table(records: list[dict[str, Any]], step: int, count: int | None) -> None:
    """Print completions with their rewards as a rich table, if rich is installed.

    Args:
        records: what `CompletionLog` wrote.
        step (`int`): for the title.
        count (`int`, *optional*): how many to draw at random; None prints all.
    """
    if not records or not is_available("rich"):
        return
    if count is not None and count < len(records):
        chosen = random.Random(step).sample(range(len(records)), max(count, 0))
        records = [records[i] for i in sorted(chosen)]
    table = require("rich.table", "log_completions").Table(
        title=f"Step {step}", show_lines=True, expand=True
    )
    text = require("rich.text", "log_completions").Text
    columns, rows = tracker_rows(records, unique_prompts=False)
    for name in columns[1:]:
        table.add_column(name, overflow="fold")
    for _, prompt, completion, *values in rows:
        table.add_row(text(prompt), text(completion), *map(_cell, values))
    if rows:
        require("rich.console", "log_completions").Console().print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def tracker_rows(
    records: list[dict[str, Any]], unique_prompts: bool
) -> tuple[list[str], list[list[Any]]]:
    """Lay records out for a tracker's table: column names, and one list a row."""
    if not records:
        return [], []
    if unique_prompts:
        first: dict[str, dict[str, Any]] = {}
        for record in records:
            first.setdefault(as_text(record["prompt"]), record)
        records = list(first.values())
    names = [*records[0]["rewards"], *records[0]["extra"]]
    rows = [
        [
            record["step"],
            as_text(record["prompt"]),
            as_text(record["completion"]),
            *((record["rewards"] | record["extra"]).get(name) for name in names),
            record["advantage"],
        ]
        for record in records
    ]
    return ["step", "prompt", "completion", *names, "advantage"], rows
