"""`trl completions`: show the completions a run wrote, grouped by prompt."""

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any

from ..imports import require
from ..number_format import format_fixed
from ..transcripts import transcript
from .parser import OneLineParser

MOST_STEPS = 8  # that are listed one by one
FIELDS = {"step", "group", "prompt", "completion", "finish", "rewards", "reward", "advantage"}


def main(words: list[str] | None = None) -> None:
    """Print a table of the completions that the options select."""
    parser = make_parser()
    options = parser.parse_args(words)
    try:
        records = read_records(Path(options.folder), options.split)
        chosen = select(records, options)
        show(chosen[: options.limit])
    except (FileNotFoundError, ValueError, ImportError) as error:
        parser.error(str(error))
    hidden = max(0, len(chosen) - options.limit)
    more = f"; {hidden} more match, see --limit" if hidden else ""
    print(f"{len(chosen) - hidden} of {len(records)} completions{more}")


def make_parser() -> argparse.ArgumentParser:
    """The options of `trl completions`."""
    parser = OneLineParser(prog="trl completions", description=__doc__)
    parser.add_argument("folder", help="output folder of a run, or a jsonl file of completions")
    parser.add_argument("--split", choices=("train", "eval", "samples"), default="train")
    parser.add_argument("--step", type=int, help="only this optimizer step")
    end = parser.add_mutually_exclusive_group()
    end.add_argument("--best", type=int, help="only the completions of highest reward")
    end.add_argument("--worst", type=int, help="only the completions of lowest reward")
    parser.add_argument("--limit", type=int, default=64, help="rows shown at most (default: 64)")
    return parser


def read_records(path: Path, split: str) -> list[dict[str, Any]]:
    """Read the completions of a run; an error names the line that is not a completion."""
    file = path if path.is_file() else path / "completions" / f"{split}.jsonl"
    if not file.is_file():
        raise FileNotFoundError(f"there are no completions at {file}.")
    records = []
    # splitlines would split inside completions; a last line may be cut inside a character.
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            record, expected = None, "a record of a completion"
            try:
                record = json.loads(line)
            except ValueError:
                expected = "valid JSON"
            if isinstance(record, dict) and record.keys() >= FIELDS:
                records.append(record)
            elif line.endswith("\n"):  # else a run is writing it
                raise ValueError(f"line {number} of {file} is not {expected}.")
    return records


def select(records: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Filter by step, then take the best or worst of what is left."""
    if options.step is not None:
        found = [record for record in records if record["step"] == options.step]
        if records and not found:
            steps = sorted({record["step"] for record in records})
            names = ", ".join(map(str, steps))
            if len(steps) > MOST_STEPS:
                near = sorted(steps, key=lambda step: abs(step - options.step))[:2]
                names = f"{steps[0]} to {steps[-1]}; the nearest are {near[0]} and {near[1]}"
            words = f"the steps that have some are {names}."
            raise ValueError(f"--step {options.step} has no completions; {words}")
        records = found
    count = options.best if options.best is not None else options.worst
    if count is None:
        return records
    scored = [record for record in records if record["reward"] is not None]
    scored.sort(key=lambda record: record["reward"], reverse=options.best is not None)
    return scored[:count]


def show(records: list[dict[str, Any]]) -> None:
    """Print the records as one table, a section for each prompt."""
    if not records:
        return
    table = require("rich.table", "trl completions").Table(expand=True)
    text = require("rich.text", "trl completions").Text
    names = list(records[0]["rewards"])
    for name in ("step", "prompt", "completion", "end", *names, "reward", "advantage"):
        table.add_column(name, overflow="fold")
    for _, group in groupby(records, key=lambda r: (r["step"], r.get("round"), r["group"])):
        for place, record in enumerate(group):
            prompt = "  same" if place else transcript(record["prompt"])
            cells = [
                str(record["step"]),
                prompt,
                transcript(record["completion"]),
                record["finish"],
            ]
            numbers = [record["rewards"].get(name) for name in names]
            for number in (*numbers, record["reward"], record["advantage"]):
                cells.append("-" if number is None else format_fixed(number, 3))
            table.add_row(*map(text, cells))
        table.add_section()
    console = require("rich.console", "trl completions").Console()
    with console.capture() as capture:
        console.print(table)
    print(capture.get(), end="")  # printed by rich, a closed pipe would end with its own status
