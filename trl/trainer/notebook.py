"""Progress of a run in a notebook: a bar, and a table of logged values."""

import html
import time
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from ..imports import require
from .progress_callbacks import ProgressDisplay

SECONDS = 1.0  # between two updates of the bar
TITLE = ""  # heading of the column that names evaluations


class NotebookProgressCallback(ProgressDisplay):
    """Shows how far training is, and a row for each log and each evaluation.

    It replaces the callback of the same name of transformers, which shows only the loss, and
    nothing of it if there are evaluations. It needs IPython.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ipython = require("IPython.display", "NotebookProgressCallback")
        self._output: Any = None  # of the cell that trains
        self._rows: list[dict[str, str]] = []
        self._drawn = 0.0

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Begin an output on the main process."""
        super().on_train_begin(args, state, control)
        self._rows = []
        self._output = None
        if self._state is not None:
            self._draw(state)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Move the bar."""
        super().on_step_end(args, state, control)
        if self._state is not None and time.monotonic() - self._drawn > SECONDS:
            self._draw(state)

    def close(self) -> None:
        """Draw for the last time."""
        state = self._state
        super().close()
        if state is not None:
            self._draw(state)

    def _show(self, state: TrainerState, metrics: dict[str, str], title: str = "") -> None:
        self._rows.append({"step": str(state.global_step), TITLE: title} | metrics)
        self._draw(state)

    def _draw(self, state: TrainerState) -> None:
        self._drawn = time.monotonic()
        page = self._ipython.HTML(self._bar(state) + _table(self._rows))
        if self._output is None:
            self._output = self._ipython.display(page, display_id=True)
        else:
            self._output.update(page)

    def _bar(self, state: TrainerState) -> str:
        done = state.global_step
        steps = state.max_steps
        if self._state is None:  # an evaluation without training, or the end
            return f"<p>step {done}/{steps}</p>"
        text = f"step {done}/{steps}, {self._elapsed()}, {self._left(state)} left"
        return f'<p><progress value="{done}" max="{steps}"></progress> {text}</p>'


def _table(rows: list[dict[str, str]]) -> str:
    """Write rows as an HTML table with all of their columns."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    has_evaluations = any(row[TITLE] for row in rows)
    if not has_evaluations:
        columns.remove(TITLE)
    header = _table_row("th", columns)
    body = "".join(_table_row("td", [row.get(name, "") for name in columns]) for row in rows)
    return f"<table><thead>{header}</thead><tbody>{body}</tbody></table>"


def _table_row(tag: str, cells: list[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
