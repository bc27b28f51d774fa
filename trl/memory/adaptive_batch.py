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

    def run(
        self,
        total: int,
        work: Callable[[range], T],
        most: int | None = None,
        reset: Callable[[], None] | None = None,
        start: int = 0,
    ) -> list[T]:
        """Work on all rows, at most `size` at once, and `most` in this call.

        `work` does some consecutive rows, and after a failure goes on from those that failed. If a
        failure leaves something behind, such as partly added gradients, `reset` undoes everything,
        including the rows before `start`, which earlier calls did, and work begins again at row 0.
        If a row does not fit alone, a `RowTooLargeError` is raised.
        """
        results: list[T] = []
        random = TorchRngState()
        while start < total:
            size = min(total, self.size or total, most or total)
            rows = range(total)[start : start + size]
            if self._attempt(rows, work, results):
                start = rows.stop
                random = random if reset else TorchRngState()
                continue
            random.restore()  # before `reset`, which may know of an earlier point
            if reset is not None:
                results.clear()
                start = 0
                reset()
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        return results

    def _attempt(self, rows: range, work: Callable[[range], T], results: list[T]) -> bool:
        """Add what `work` returns to `results`; False if it ran out of memory."""
        try:
            results.append(work(rows))
            return True
        except Exception as error:
            if self.disabled or not is_out_of_memory(error):
                raise
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
        return False


def drop_frames(error: BaseException | None) -> None:
    """Let go of local variables of the calls that an error, and what led to it, passed through."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
