"""JSON lines that a run appends, each with the optimizer step that it belongs to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class StepLines:
    """A file of JSON lines with `step`, whole at any instant.

    Args:
        path: the file; it is made, with its folder, when the first line is added.
    """

    def __init__(self, path: Path):
        self.path = path

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """Append records; what JSON cannot hold is written as text."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")

    def keep_until(self, step: int) -> None:
        """Drop what a run that went further than `step` wrote, and lines that a crash cut off."""
        if not self.path.exists():
            return
        kept = self.path.with_suffix(".kept")
        with self.path.open(encoding="utf-8") as old, kept.open("w", encoding="utf-8") as new:
            # Iteration splits where splitlines would not: at \n alone.
            new.writelines(line for line in old if _step_of(line) <= step)
        kept.replace(self.path)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except ValueError:
        return float("inf")
