"""Recovery from running out of memory: the same work on fewer rows at once."""

import gc
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch
from transformers.utils import logging

from ..ops.oom import is_out_of_memory
from ..random_numbers import TorchRngState

logger = logging.get_logger(__name__)

T = TypeVar("T")

# For each phase: the option that sets its rows, and what else makes one row smaller.
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
    """How many rows a phase works on at once: halved, for good, whenever they do not fit.

    Interrupted work is done again on the same rows with the same random numbers. If its rows do not
    depend on each other, the outcome is that of a run that had the smaller size from the start. The
    work must not wait for other processes, which know nothing of a failure here.

    Messages name the `phase`, a key of `OPTIONS`. A `size` of None is no limit until memory runs
    out. `unit` rows are never separated, `failures` counts how often memory ran out, and a batch
    that is `disabled` lets every error through.
    """

    def __init__(self, phase: str, size: int | None = None, disabled: bool = False):
        self.phase, self.size = phase, size
        self.option, self._advice = OPTIONS[phase]
        self.disabled = disabled
        self.unit = 1
        self.failures = 0

    def run(self, total: int, work: Callable[[range], T], most: int | None = None) -> list[T]:
        """Work on all rows, at most `size` at once, and `most` in this call.

        `work` does some consecutive rows, and after a failure goes on from those that failed. If a
        row does not fit alone, a `RowTooLargeError` is raised.
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
        """Halve the size after an error of the work on `rows`; raise what no smaller size helps.

        That is any error but one of memory, and a `RowTooLargeError` where there was one row.
        """
        if self.disabled or not is_out_of_memory(error):
            raise error
        drop_frames(error)
        self.failures += 1
        if len(rows) <= self.unit:
            rest = "" if self.unit == 1 else f" and the next {self.unit - 1}, kept together"
            raise RowTooLargeError(
                f"Out of memory in {self.phase} with only row {rows.start}{rest}, so "
                f"{self.option}=1 does not help. What may help: {self._advice}. The "
                f"allocator's message: {error}"
            ) from error
        self.size = max(1, len(rows) // 2 // self.unit) * self.unit
        logger.warning(
            f"Out of memory in {self.phase} with {len(rows)} rows at once: continuing with "
            f"{self.size} at once on the same data. Set {self.option}={self.size // self.unit} to "
            "start with that."
        )


def free_memory() -> None:
    """Give back what an interrupted computation held; called outside of an `except` block."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def drop_frames(error: BaseException | None) -> None:
    """Let go of local variables of the calls that an error, and what led to it, passed through."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
