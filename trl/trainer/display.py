"""Choose how progress is shown: in a terminal, a file or a notebook."""

import sys
from collections.abc import Iterable

from transformers import ProgressCallback, Trainer, TrainerCallback

from ..imports import is_available
from .notebook import NotebookProgressCallback
from .progress_callbacks import PlainProgressCallback, ProgressDisplay, RichProgressCallback

NOTEBOOK = "NotebookProgressCallback"  # of transformers, which imports it in notebooks alone


def show_progress(trainer: Trainer) -> None:
    """Replace the progress display of transformers, if the trainer has one.

    In a terminal without rich, the bar of transformers stays; its table in a notebook never does.
    """
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__name__ == NOTEBOOK and not isinstance(callback, ProgressDisplay):
            trainer.remove_callback(type(callback))
            trainer.add_callback(NotebookProgressCallback())
            return
    shows_bar = any(type(x) is ProgressCallback for x in trainer.callback_handler.callbacks)
    in_terminal = sys.stdout.isatty()
    if shows_bar and (is_available("rich") or not in_terminal):
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(RichProgressCallback() if in_terminal else PlainProgressCallback())


def close_progress(callbacks: Iterable[TrainerCallback]) -> None:
    """Stop the progress displays among the callbacks, so that other text can be shown."""
    for callback in callbacks:
        if isinstance(callback, ProgressDisplay):
            callback.close()
