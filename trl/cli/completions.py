"""`trl completions`: show the completions that a run wrote, grouped by prompt."""

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any

from ..imports import require
from ..number_format import format_fixed
from ..transcripts import transcript
from .parser import OneLineParser

MAX_LISTED_STEPS = 8  # with more steps, an error names only the range
# Fields that every record of a completion has.
FIELDS = {"step", "group", "prompt", "completion", "finish", "rewards", "reward", "advantage"}


def main(argv: list[str] | None = None) -> None:
    """Print a table of the completions that the options select."""
    parser = make_parser()
    options = parser.parse_args(argv)
    try:
        records = read_records(Path(options.folder), options.split)
        selected = select_records(records, options)
        print_table(selected[: options.limit])
    except (FileNotFoundError, ValueError, ImportError) as error:
        parser.error(str(error))
    hidden = max(0, len(selected) - options.limit)
    more = f"; {hidden} more match, see --limit" if hidden else ""
    print(f"{len(selected) - hidden} of {len(records)} completions{more}")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `trl completions`."""
    parser = OneLineParser(prog="trl completions", description=__doc__)
    parser.add_argument("folder", help="output folder of a run, or a jsonl file of completions")
    parser.add_argument("--split", choices=("train", "eval", "samples"), default="train")
    parser.add_argument("--step", type=int, help="only this optimizer step")
    ranking = parser.add_mutually_exclusive_group()
    ranking.add_argument("--best", type=int, help="only this many completions of highest reward")
    ranking.add_argument("--worst", type=int, help="only this many completions of lowest reward")
    parser.add_argument("--limit", type=int, default=64, help="most rows to show (default: 64)")
    return parser


def read_records(path: Path, split: str) -> list[dict[str, Any]]:
    """Read the completions of a run.

    Args:
        path: output folder of a run, or a file of completions.
        split: "train", "eval" or "samples".

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: names the line that is not the record of a completion.
    """
    file = path if path.is_file() else path / "completions" / f"{split}.jsonl"
    if not file.is_file():
        raise FileNotFoundError(f"there are no completions at {file}.")
    records = []
    # Not `splitlines`, which would split inside completions. A crash may have cut the last line
    # inside a multi-byte character, hence errors="replace".
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            record = None
            expected = "a record of a completion"
            try:
                record = json.loads(line)
            except ValueError:
                expected = "valid JSON"
            if isinstance(record, dict) and record.keys() >= FIELDS:
                records.append(record)
            elif line.endswith("\n"):  # otherwise, the run is still writing this line
                raise ValueError(f"line {number} of {file} is not {expected}.")
    return records


def select_records(
    records: list[dict[str, Any]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Keep the records of `--step`, then the `--best` or `--worst` of them."""
    if options.step is not None:
        records = _records_of_step(records, options.step)
    count = options.best if options.best is not None else options.worst
    if count is None:
        return records
    scored = [record for record in records if record["reward"] is not None]
    scored.sort(key=lambda record: record["reward"], reverse=options.best is not None)
    return scored[:count]


def _records_of_step(records: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """Return the records of an optimizer step; if it has none, the error names steps that do."""
    of_step = [record for record in records if record["step"] == step]
    if records and not of_step:
        steps = sorted({record["step"] for record in records})
        step_names = ", ".join(map(str, steps))
        if len(steps) > MAX_LISTED_STEPS:
            nearest = sorted(steps, key=lambda other: abs(other - step))[:2]
            step_names = f"{steps[0]} to {steps[-1]}; the nearest are {nearest[0]} and {nearest[1]}"
        raise ValueError(
            f"--step {step} has no completions; the steps that have some are {step_names}."
        )
    return of_step


def print_table(records: list[dict[str, Any]]) -> None:
    """Print the records as one table, with a section for each group of completions."""
    if not records:
        return
    table = require("rich.table", "trl completions").Table(expand=True)
    text_class = require("rich.text", "trl completions").Text
    reward_names = list(records[0]["rewards"])
    for name in ("step", "prompt", "completion", "end", *reward_names, "reward", "advantage"):
        table.add_column(name, overflow="fold")
    for _, group in groupby(records, key=_group_key):
        for index, record in enumerate(group):
            prompt = "  same" if index else transcript(record["prompt"])
            cells = [
                str(record["step"]),
                prompt,
                transcript(record["completion"]),
                record["finish"],
            ]
            numbers = [record["rewards"].get(name) for name in reward_names]
            for number in (*numbers, record["reward"], record["advantage"]):
                cells.append("-" if number is None else format_fixed(number, 3))
            table.add_row(*map(text_class, cells))
        table.add_section()
    console = require("rich.console", "trl completions").Console()
    with console.capture() as capture:
        console.print(table)
    # If rich printed this itself, it would end the process on a closed pipe, with its own status.
    print(capture.get(), end="")


def _group_key(record: dict[str, Any]) -> tuple[int, int | None, int]:
    """Return what the completions of a group have in common: step, rollout batch and group."""
    return record["step"], record.get("round"), record["group"]
