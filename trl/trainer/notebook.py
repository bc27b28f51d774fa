"""What a person sees of a run in a notebook: a bar, and a table of logged values."""

import html
import time
from typing import Any

from transformers import TrainerState

from ..imports import require
from .display import _ProgressCallback

SECONDS = 1.0  # between two updates of the bar


class NotebookProgressCallback(_ProgressCallback):
    """Shows how far training is, and a row for each log and each evaluation.

    It takes the place of the callback of the same name of transformers, which shows the loss alone,
    and none of it where there are evaluations. It needs IPython.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ipython = require("IPython.display", "NotebookProgressCallback")
        self._output: Any = None  # of the cell that trains
        self._rows: list[dict[str, str]] = []
        self._drawn = 0.0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Begin an output on the main process."""
        super().on_train_begin(args, state, control)
        self._rows, self._output = [], None
        if self._state is not None:
            self._draw(state)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
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
        self._rows.append({"step": str(state.global_step), "": title} | metrics)
        self._draw(state)

    def _draw(self, state: TrainerState) -> None:
        self._drawn = time.monotonic()
        page = self._ipython.HTML(self._bar(state) + _table(self._rows))
        if self._output is None:
            self._output = self._ipython.display(page, display_id=True)
        else:
            self._output.update(page)

    def _bar(self, state: TrainerState) -> str:
        done, steps = state.global_step, state.max_steps
        if self._state is None:  # an evaluation without training, or the end
            return f"<p>step {done}/{steps}</p>"
        text = f"step {done}/{steps}, {self._elapsed()}, {self._left(state)} left"
        return f'<p><progress value="{done}" max="{steps}"></progress> {text}</p>'


def _table(rows: list[dict[str, str]]) -> str:
    """Write rows as an HTML table with all of their columns."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not any(row.get("") for row in rows):  # there was no evaluation
        names = [name for name in names if name]
    header = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    lines = [
        "".join(f"<td>{html.escape(row.get(name, ''))}</td>" for name in names) for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
