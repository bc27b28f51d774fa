"""JSON lines that a run appends, each with the optimizer step that it belongs to."""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from .json_text import json_text


class StepLines:
    """A file of JSON lines with `step`, whole at any instant; made with its first line."""

    def __init__(self, path: Path):
        self.path = path

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """Append records; NaN becomes null, and what JSON cannot hold otherwise, text."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            for record in records:
                file.write(json_text(record) + "\n")

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the records, without a last line that is being written or was cut off.

        A crash may have cut it inside a character of several bytes.
        """
        if not self.path.exists():
            return
        with self.path.open(encoding="utf-8", errors="replace") as file:
            for line in file:  # splitlines would split at more than \n
                with suppress(ValueError):
                    if line.endswith("\n"):
                        yield json.loads(line)

    def keep_until(self, step: int) -> None:
        """Drop what a run that went further than `step` wrote, and lines that a crash cut off."""
        if not self.path.exists():
            return
        kept = StepLines(self.path.with_suffix(".kept"))
        kept.path.write_text("")
        kept.add(record for record in self.read() if record["step"] <= step)
        kept.path.replace(self.path)
