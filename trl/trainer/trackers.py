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
    wandb = sys.modules.get("wandb")
    if "wandb" in report_to and wandb is not None and wandb.run is not None:
        table = wandb.Table(columns=columns, data=[[_cell(x) for x in row] for row in rows])
        wandb.log({"completions": table})
    trackio = sys.modules.get("trackio")
    if "trackio" in report_to and trackio is not None:
        import pandas

        trackio.log({"completions": trackio.Table(pandas.DataFrame(rows, columns=columns))})


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, float, str)) else str(value)
