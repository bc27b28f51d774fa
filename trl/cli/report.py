"""`trl report`: one HTML page of a run, or of two to compare, that needs no server."""

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
ON_A_PAGE = 200  # completions that are unpacked at once
# What completions are sorted by, without unpacking their texts.
INDEX = ("step", "round", "group", "reward", "advantage", "finish")


def main(words: list[str] | None = None) -> None:
    """Write the page, once or whenever the run has progressed."""
    parser = make_parser()
    options = parser.parse_args(words)
    folders = [Path(folder) for folder in options.folders]
    try:
        if len(folders) > 2:
            raise ValueError(f"give one run, or two to compare, not {len(folders)}.")
        written = _write(folders, options)
        while options.watch:
            time.sleep(options.watch)
            if written != [_files(folder) for folder in folders]:
                written = _write(folders, options)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _write(folders: list[Path], options: argparse.Namespace) -> list[dict[str, int]]:
    """Write the page; returns the files that it is made of, with their sizes."""
    found = [_files(folder) for folder in folders]
    text = page([read_run(folder, options.most) for folder in folders])
    output = Path(options.output or _default_output(folders))
    whole = output.with_suffix(".part")  # a browser never reads half of it
    try:
        whole.write_text(text, encoding="utf-8")
        whole.replace(output)
    except OSError as error:
        raise ValueError(f"{output} cannot be written: {error.strerror}; see --output.") from None
    print(f"{output}: {format_bytes(len(text.encode()))}", flush=True)
    return found


def _default_output(folders: list[Path]) -> Path:
    """`report.html` in the folder of a run; a comparison has a page of its own beside it."""
    others = "".join(f"-and-{folder.resolve().name}" for folder in folders[1:])
    return folders[0] / f"report{others}.html"


def make_parser() -> argparse.ArgumentParser:
    """The options of `trl report`."""
    parser = OneLineParser(prog="trl report", description=__doc__)
    parser.add_argument("folders", nargs="+", help="output folder of a run, or of two to compare")
    parser.add_argument(
        "--output",
        help="page to write (default: report.html in the folder, "
        "or report-and-SECOND.html in the first of two)",
    )
    parser.add_argument("--most", type=int, default=10_000, help="newest completions to keep")
    parser.add_argument(
        *("--watch", "-w"), type=float, nargs="?", const=30.0, metavar="SECONDS",
        help="write the page again whenever the run has progressed; checked every 30 seconds",
    )  # fmt: skip
    return parser


def _files(folder: Path) -> dict[str, int]:
    files = [folder / name for name in ("run.json", "metrics.jsonl", "memory.jsonl")]
    files += [folder / "completions" / f"{split}.jsonl" for split in SPLITS]
    return {str(file): file.stat().st_size for file in files if file.exists()}


def read_run(folder: Path, most: int) -> dict[str, Any]:
    """Collect what a page shows of the run in a folder, with the newest `most` completions."""
    if not _files(folder):
        raise ValueError(f"{folder} has no run.json, metrics.jsonl or completions of a run.")
    settings, file = {}, folder / "run.json"
    if file.exists():
        found = redact(json.loads(file.read_text(encoding="utf-8")))
        settings = found.pop("options", {}) | found
    words = {name: json_text(x) for name, x in sorted(settings.items())}
    return {
        "name": folder.resolve().name,
        "settings": words,
        "metrics": _metrics(folder),
        "completions": {split: _completions(folder, split, most) for split in SPLITS},
    }


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """The logs, with the seconds of each phase of their step."""
    seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in JsonLinesFile(folder / "memory.jsonl").read():
        seconds[event["step"]][f"seconds/{event['phase']}"] += event["end"] - event["start"]
    found = []
    for log in JsonLinesFile(folder / "metrics.jsonl").read():
        numbers = {name: x for name, x in log.items() if isinstance(x, int | float)}
        numbers |= seconds.get(log["step"], {})
        found.append({name: x for name, x in numbers.items() if math.isfinite(x)})
    return found


def _completions(folder: Path, split: str, most: int) -> dict[str, Any]:
    """The index of the completions, and their texts in packed pages."""
    file = folder / "completions" / f"{split}.jsonl"
    found = read_records(file, split) if file.exists() else []
    records = found[-most:]
    texts = [
        {
            "prompt": transcript(record["prompt"]),
            "completion": transcript(record["completion"]),
            "rewards": record["rewards"] | (record.get("extra") or {}),
            "tokens": record.get("tokens"),
        }
        for record in records
    ]
    pages = [_packed(texts[i : i + ON_A_PAGE]) for i in range(0, len(texts), ON_A_PAGE)]
    columns = {name: [record.get(name) for record in records] for name in INDEX}
    columns["length"] = [len(record.get("completion_ids") or ()) for record in records]
    return {"total": len(found), "columns": _packed(columns), "pages": pages}


def _packed(value: Any) -> str:
    text = json_text(value, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def page(runs: list[dict[str, Any]]) -> str:
    """Make the page of one or two runs, as of `read_run`."""
    template = resources.files("trl").joinpath("templates/report.html").read_text(encoding="utf-8")
    data = {"size": ON_A_PAGE, "runs": runs}
    # Nothing in the data can end the element that it stands in.
    text = json_text(data, separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("__DATA__", text)
