"""`trl report`: write an HTML page of a run, or of two to compare, that needs no server."""

import argparse
import base64
import gzip
import json
import math
import time
from collections import defaultdict
from importlib import resources
from pathlib import Path
from typing import Any

from ..json_files import JsonLinesFile, json_text
from ..number_format import format_bytes
from ..redaction import redact
from ..transcripts import transcript
from .completions import read_records
from .parser import OneLineParser

SPLITS = ("train", "eval", "samples")
COMPLETIONS_PER_CHUNK = 200  # completions that the browser decompresses at once
# Columns by which completions are sorted, without decompressing their texts.
INDEX_COLUMNS = ("step", "round", "group", "reward", "advantage", "finish")


def main(argv: list[str] | None = None) -> None:
    """Write the page, once or whenever the run has progressed."""
    parser = make_parser()
    options = parser.parse_args(argv)
    folders = [Path(folder) for folder in options.folders]
    try:
        if len(folders) > 2:
            raise ValueError(f"give one run, or two to compare, not {len(folders)}.")
        file_sizes = _write_page(folders, options)
        while options.watch:
            time.sleep(options.watch)
            if file_sizes != [_file_sizes(folder) for folder in folders]:
                file_sizes = _write_page(folders, options)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _write_page(folders: list[Path], options: argparse.Namespace) -> list[dict[str, int]]:
    """Write the page; return the sizes of each run's files at the time they were read."""
    file_sizes = [_file_sizes(folder) for folder in folders]
    text = page([read_run(folder, options.most) for folder in folders])
    output = Path(options.output or _default_output(folders))
    temporary = output.with_suffix(".part")  # so that a browser never reads an incomplete page
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(output)
    except OSError as error:
        raise ValueError(f"{output} cannot be written: {error.strerror}; see --output.") from None
    print(f"{output}: {format_bytes(len(text.encode()))}", flush=True)
    return file_sizes


def _default_output(folders: list[Path]) -> Path:
    """Return `report.html` in the folder of a run, or `report-and-SECOND.html` for two runs."""
    suffix = "".join(f"-and-{folder.resolve().name}" for folder in folders[1:])
    return folders[0] / f"report{suffix}.html"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `trl report`."""
    parser = OneLineParser(prog="trl report", description=__doc__)
    parser.add_argument("folders", nargs="+", help="output folder of a run, or of two to compare")
    parser.add_argument(
        "--output",
        help="page to write (default: report.html in the folder, "
        "or report-and-SECOND.html in the first of two)",
    )
    parser.add_argument("--most", type=int, default=10_000, help="newest completions to keep")
    parser.add_argument(
        "--watch",
        "-w",
        type=float,
        nargs="?",
        const=30.0,
        metavar="SECONDS",
        help="write the page again whenever the run has progressed; checked every 30 seconds",
    )
    return parser


def _file_sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of the files of a run that a page shows."""
    files = [folder / name for name in ("run.json", "metrics.jsonl", "memory.jsonl")]
    files += [folder / "completions" / f"{split}.jsonl" for split in SPLITS]
    return {str(file): file.stat().st_size for file in files if file.exists()}


def read_run(folder: Path, most: int) -> dict[str, Any]:
    """Read what a page shows of the run in a folder, with the newest `most` completions."""
    if not _file_sizes(folder):
        raise ValueError(f"{folder} has no run.json, metrics.jsonl or completions of a run.")
    settings: dict[str, Any] = {}
    run_file = folder / "run.json"
    if run_file.exists():
        run = redact(json.loads(run_file.read_text(encoding="utf-8")))
        settings = run.pop("options", {}) | run
    return {
        "name": folder.resolve().name,
        "settings": {name: json_text(value) for name, value in sorted(settings.items())},
        "metrics": _metrics(folder),
        "completions": {split: _completions(folder, split, most) for split in SPLITS},
    }


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the logs, each with the seconds that the phases of its step took."""
    seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in JsonLinesFile(folder / "memory.jsonl").read():
        seconds[event["step"]][f"seconds/{event['phase']}"] += event["end"] - event["start"]
    logs = []
    for log in JsonLinesFile(folder / "metrics.jsonl").read():
        metrics = {name: value for name, value in log.items() if isinstance(value, int | float)}
        metrics |= seconds.get(log["step"], {})
        logs.append({name: value for name, value in metrics.items() if math.isfinite(value)})
    return logs


def _completions(folder: Path, split: str, most: int) -> dict[str, Any]:
    """Return the index of the newest completions, and their texts in compressed chunks."""
    file = folder / "completions" / f"{split}.jsonl"
    all_records = read_records(file, split) if file.exists() else []
    records = all_records[-most:]
    texts = [
        {
            "prompt": transcript(record["prompt"]),
            "completion": transcript(record["completion"]),
            "rewards": record["rewards"] | (record.get("extra") or {}),
            "tokens": record.get("tokens"),
        }
        for record in records
    ]
    starts = range(0, len(texts), COMPLETIONS_PER_CHUNK)
    chunks = [_compress(texts[start : start + COMPLETIONS_PER_CHUNK]) for start in starts]
    columns = {name: [record.get(name) for record in records] for name in INDEX_COLUMNS}
    columns["length"] = [len(record.get("completion_ids") or ()) for record in records]
    return {"total": len(all_records), "columns": _compress(columns), "pages": chunks}


def _compress(value: object) -> str:
    """Convert a value to JSON, compressed by gzip, in base64."""
    text = json_text(value, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def page(runs: list[dict[str, Any]]) -> str:
    """Make the page of one or two runs, which `read_run` has read."""
    template = resources.files("trl").joinpath("templates/report.html").read_text(encoding="utf-8")
    data = {"size": COMPLETIONS_PER_CHUNK, "runs": runs}
    # Escape "<", so that no text in the data can close the script element around it.
    text = json_text(data, separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("__DATA__", text)
