"""Recover from out-of-memory errors by doing the same work on fewer rows at once."""

import gc
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch
from transformers.utils import logging

from ..ops.oom import is_out_of_memory
from .random_numbers import TorchRngState

logger = logging.get_logger(__name__)

T = TypeVar("T")

# For each phase: the option that sets its rows, and what else reduces the memory of a row.
_EVERYWHERE = "a smaller max_completion_length, shorter prompts, bf16=True"
OPTIONS: dict[str, tuple[str, str]] = {
    "generation": ("generation_max_rows", f"empty_cache='always', {_EVERYWHERE}"),
    "scoring": ("per_device_train_batch_size", f"logits_chunk_size, {_EVERYWHERE}"),
    "rewards": ("per_device_train_batch_size", "a smaller reward model, shorter completions"),
    "training": (
        "per_device_train_batch_size",
        f"gradient_checkpointing=True, logits_chunk_size, an adapter, {_EVERYWHERE}",
    ),
}


class RowTooLargeError(torch.OutOfMemoryError):
    """A single row does not fit, so there is no smaller batch to try."""


class AdaptiveBatch:
    """How many rows a phase works on at once; halved for good whenever they do not fit.

    Interrupted work is repeated on the same rows with the same random numbers. If rows do not
    depend on each other, the result is that of a run with the smaller size from the start. The work
    must not communicate with other processes, which do not notice a failure here.

    Messages name the `phase`, a key of `OPTIONS`. A `size` of None means no limit until memory runs
    out. Where groups are never divided, a row is a group. `failures` counts how often memory ran
    out, and if it is `disabled`, errors are not caught.
    """

    def __init__(self, phase: str, size: int | None = None, disabled: bool = False):
        self.phase = phase
        self.size = size
        self.option, self._advice = OPTIONS[phase]
        self.disabled = disabled
        self.failures = 0

    def run(self, total: int, work: Callable[[range], T], most: int | None = None) -> list[T]:
        """Work on `total` rows, at most `size` at once, in this call also at most `most` at once.

        `work` processes a range of rows. After a failure the same rows are tried again, fewer at
        once. Raises a `RowTooLargeError` if a single row does not fit.
        """
        results: list[T] = []
        start = 0
        while start < total:
            random = TorchRngState()
            size = min(total, self.size or total, most or total)
            rows = range(start, min(start + size, total))
            try:
                results.append(work(rows))
                start = rows.stop
                continue
            except Exception as error:
                self.shrink(error, rows)
            random.restore()
            free_memory()
        return results

    def shrink(self, error: Exception, rows: range) -> None:
        """Halve the size after an out-of-memory error of the work on `rows`.

        Raises any other error again, and a `RowTooLargeError` if there was only one row.
        """
        if self.disabled or not is_out_of_memory(error):
            raise error
        drop_frames(error)
        self.failures += 1
        if len(rows) == 1:
            raise RowTooLargeError(
                f"Out of memory in {self.phase} with only row {rows.start}, so {self.option}=1 "
                f"does not help. What may help: {self._advice}. The allocator's message: {error}"
            ) from error
        self.size = len(rows) // 2
        logger.warning(
            f"Out of memory in {self.phase} with {len(rows)} rows at once: continuing with "
            f"{self.size} at once on the same data. Set {self.option}={self.size} to start with "
            "that."
        )


def free_memory() -> None:
    """Give back what an interrupted computation held; called outside of an `except` block."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def drop_frames(error: BaseException | None) -> None:
    """Free the local variables in the traceback of an error, and in those of its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
