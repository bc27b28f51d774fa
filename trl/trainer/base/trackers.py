"""Sending tables to experiment trackers that are running."""

from __future__ import annotations

import sys
from typing import Any


def log_table(report_to: list[str], columns: list[str], rows: list[list[Any]]) -> None:
    """Send a table called `completions` to the active wandb and trackio runs.

    Args:
        report_to: trackers of the run; others are left alone.
        columns: names.
        rows: one list of values each.
    """
    if not rows:
        return
    running = {name: sys.modules.get(name) for name in ("wandb", "trackio") if name in report_to}
    if (wandb := running.get("wandb")) and wandb.run is not None:
        cells = [[_cell(value) for value in row] for row in rows]
        wandb.log({"completions": wandb.Table(columns=columns, data=cells)})
    if (trackio := running.get("trackio")) and trackio.context_vars.current_run.get() is not None:
        trackio.log({"completions": trackio.Table(columns=columns, data=rows)})


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, float, str)) else str(value)
