"""What a training command says when it ends: where the model is, or how to go on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from ..trainer.base.checkpoint import checkpoints_in
from .main import INTERRUPTED


def rank() -> int:
    """Number of this process among those that were launched together."""
    return int(os.environ.get("RANK", "0"))


@contextmanager
def telling_the_end(program: str, trainer: Any = None) -> Iterator[None]:
    """Say how to go on with what is interrupted or fails inside.

    Ctrl-C becomes one line and status 130. Other errors are raised with a note.

    Args:
        program (`str`): such as "trl rloo".
        trainer (`OnlineTrainer`, *optional*): what is trained; None before there is one.
    """
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next one ends this process at once
        if rank() == 0:
            print(f"{program}: interrupted {_place(trainer)}", file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        if trainer is not None and trainer.state.global_step > 0:
            error.add_note(f"This was {_place(trainer)}")
        raise


def _place(trainer: Any) -> str:
    """After how many steps that is, and the newest checkpoint."""
    if trainer is None:
        return "before training began."
    state, folder = trainer.state, trainer.args.output_dir
    steps = f"after {state.global_step} of {state.max_steps} steps."
    found = checkpoints_in(folder)
    if not found:
        return f"{steps} There is no checkpoint in {folder}."
    words = f"{steps} The newest checkpoint is {found[0]}"
    return words + (
        "."
        if trainer.args.save_only_model
        else "; to go on from there, repeat the command with --resume_from_checkpoint true."
    )


def tell_success(trainer: Any) -> None:
    """Print how many steps are done, and where the model is."""
    if trainer.is_world_process_zero():
        state = trainer.state
        steps = f"{state.global_step} of {state.max_steps} steps are done"
        print(f"{steps}; the model is in {trainer.args.output_dir}.", flush=True)


def check_output_dir(folder: str) -> None:
    """Check that files can be written below a folder, which may have to be made.

    Raises:
        ValueError: if they cannot.
    """
    place = Path(folder).absolute()
    try:
        while not os.path.lexists(place):
            place = place.parent
        if not place.is_dir():
            raise NotADirectoryError(None, "it is no folder")
        with TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ValueError(
            f"--output_dir {folder}: nothing can be written in {place}: {error.strerror}."
        ) from None
