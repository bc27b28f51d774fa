"""Collectives of a training step, through accelerate, and errors that reach all ranks."""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from torch import Tensor
from transformers.integrations import deepspeed

from .ops.torch_internals import default_store
from .timed_calls import FAILURES, Outcome

# Seconds that a rank waits before it reports the failure of another one. The launcher then sees the
# rank that failed first.
LAUNCHER_SECONDS = 5.0

# How the backends of torch.distributed report that another rank has ended or does not answer.
_COLLECTIVE_ERROR = re.compile(r"gloo/|NCCL|c10d")
_FAILURE_KEY = "trl/failed"  # in the store of the default process group
T = TypeVar("T")


class RankError(Exception):
    """Another rank failed.

    Not a `RuntimeError`, so that code which handles those does not mistake it for a failure of this
    rank.
    """


class Ranks:
    """Collectives over the processes of an accelerator, and failures that all ranks raise.

    Without an accelerator, this process is the only rank.

    Args:
        per_row: number of neighboring ranks that divide the tokens of each row among them.
    """

    def __init__(self, accelerator: Accelerator | None = None, per_row: int = 1):
        self._accelerator: Any = accelerator
        self.per_row = per_row
        self.rank: int = 0 if accelerator is None else accelerator.process_index
        self.count: int = 1 if accelerator is None else accelerator.num_processes
        self._engine = getattr(accelerator, "distributed_type", DistributedType.NO)
        self._propagates_failures = False
        # Index of this rank's shard of the rows, and the number of shards.
        self.data_shard: tuple[int, int] = (self.rank // per_row, self.count // per_row)
        # Whether the model is wrapped by a distributed engine, even in a single process.
        self.is_distributed: bool = self._engine != DistributedType.NO
        # Whether ranks may run different numbers of forward and backward passes.
        self.allows_uneven_passes = self._engine not in (
            DistributedType.FSDP,
            DistributedType.DEEPSPEED,
        )

    @property
    def shards_weights(self) -> bool:
        """Whether each rank holds only a shard of each weight: FSDP, or DeepSpeed ZeRO-3."""
        if self._engine == DistributedType.DEEPSPEED:
            return bool(self._accelerator.state.deepspeed_plugin.zero_stage == 3)
        return self._engine == DistributedType.FSDP

    @property
    def fsdp_version(self) -> int | None:
        """The version of FSDP, 1 or 2; None without FSDP."""
        plugin = getattr(getattr(self._accelerator, "state", None), "fsdp_plugin", None)
        return None if plugin is None else int(plugin.fsdp_version)

    def row_group(self) -> torch.distributed.ProcessGroup:
        """Create the process group of the ranks that have the same rows as this one."""
        if self.count % self.per_row:
            raise ValueError(
                f"cp_size (or sp_size), {self.per_row}, must be a divisor of the number of "
                f"processes, {self.count}."
            )
        return torch.distributed.new_subgroups(self.per_row)[0]

    def wait(self) -> None:
        """Wait until every rank has called this."""
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()

    def gather(self, rows: Tensor) -> Tensor:
        """Concatenate the rows (B, ...) of all ranks in rank order: (N, ...), on the device."""
        rows = self._on_device(rows)
        return rows if self.count == 1 else self._accelerator.gather(rows.contiguous())

    def sum(self, value: Tensor) -> Tensor:
        """Sum a tensor over all ranks; the result is on the device."""
        value = self._on_device(value)
        return value if self.count == 1 else self._accelerator.reduce(value, reduction="sum")

    def _on_device(self, value: Tensor) -> Tensor:
        return value if self._accelerator is None else value.to(self._accelerator.device)

    def all(self, flag: bool) -> bool:
        """Return whether `flag` is true on every rank."""
        return flag if self.count == 1 else int(self.sum(torch.tensor(int(flag)))) == self.count

    def max(self, value: float) -> float:
        """Return the largest of the ranks' numbers; NaN if one of them is NaN."""
        return float(torch.tensor(self.gather_objects(value), dtype=torch.float64).max())

    def gather_objects(self, value: Any) -> list[Any]:
        """Return one picklable object from each rank, in rank order, on every rank."""
        return [value] if self.count == 1 else gather_object([value])

    def compute_on_rank_0(self, compute: Callable[[], T], task: str) -> T:
        """Compute a picklable value on rank 0 only, and return it on every rank.

        If the computation fails, all ranks raise an error that names the `task`; see
        `fail_together`.
        """
        values: list[Any] = [None]
        with self.fail_together(task):
            if self.rank == 0:
                values = [compute()]
        if self.count > 1:
            broadcast_object_list(values)
        return values[0]

    def gather_objects_on_rank_0(self, value: Any) -> list[Any]:
        """Return one picklable object from each rank, in rank order; [] on ranks other than 0."""
        if self.count == 1:
            return [value]
        gathered = [None] * self.count if self.rank == 0 else None
        torch.distributed.gather_object(value, gathered)
        return gathered or []

    def local(self, rows: Tensor) -> Tensor:
        """Return this rank's rows (B, ...) of gathered rows (N, ...)."""
        size = rows.shape[0] // self.count
        return rows[self.rank * size : (self.rank + 1) * size]

    @contextmanager
    def fail_together(self, task: str) -> Iterator[None]:
        """If the block raises on one rank, raise an error on all ranks.

        The block must not communicate with other ranks. The error of the other ranks names the
        `task`.
        """
        failure = None
        try:
            yield
        except RankError:  # every rank already raises it
            raise
        except FAILURES as error:
            failure = error
        self.raise_everywhere(failure, task)

    def raise_everywhere(self, failure: BaseException | None, task: str) -> None:
        """Raise this rank's failure, if any, or a `RankError` if another rank has failed.

        Every rank must call this. The `RankError` names the `task` in which the rank failed.
        """
        own_error = None if failure is None else Outcome(failure=failure).error_text
        errors = self.gather_objects(own_error)
        if failure is not None:
            raise failure
        for rank, error in enumerate(errors):
            if error is not None:
                raise RankError(f"Rank {rank} failed in {task}: {error}")

    @contextmanager
    def propagate_failures(self) -> Iterator[None]:
        """Let every rank report which rank failed first, and why.

        A rank that fails by itself publishes its error in the store of the process group. The
        collectives of the other ranks then fail, at once or after `ddp_timeout`. Those ranks wait a
        moment, so that a launcher sees the first failure first, and raise a `RankError` with the
        published error.
        """
        if self._propagates_failures or self.count == 1:
            yield
            return
        self._propagates_failures = True
        try:
            yield
        except Exception as error:
            is_rank_error = isinstance(error, RankError)
            lost_contact = not is_rank_error and _comes_from_collective(error)
            if (is_rank_error or lost_contact) and "TORCHELASTIC_RUN_ID" in os.environ:
                time.sleep(LAUNCHER_SECONDS)
            if lost_contact:
                cause = _published_failure()
                raise RankError(f"Rank {self.rank} lost contact with a rank: {cause}") from error
            if is_rank_error:
                raise
            with suppress(RuntimeError, ValueError):  # the store may be gone
                error_text = f"rank {self.rank} failed: {Outcome(failure=error).error_text}"
                default_store().set(_FAILURE_KEY, error_text)
            error.add_note(f"This was rank {self.rank} of {self.count}.")
            raise
        finally:
            self._propagates_failures = False


@contextmanager
def without_zero3_init() -> Iterator[None]:
    """Create models with whole weights inside the block, even if training uses ZeRO-3.

    With a ZeRO-3 configuration, transformers shards the weights of every model that it creates.
    """
    weak_reference = deepspeed._hf_deepspeed_config_weak_ref
    config = None if weak_reference is None else weak_reference()
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if config is not None:
            deepspeed.set_hf_deepspeed_config(config)


def _comes_from_collective(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, was raised by a collective."""
    if error is None:
        return False
    if isinstance(error, torch.distributed.DistError):
        return True
    if isinstance(error, RuntimeError) and _COLLECTIVE_ERROR.search(str(error)) is not None:
        return True
    return _comes_from_collective(error.__cause__ or error.__context__)


def _published_failure() -> str:
    """Return the error that the last failing rank published."""
    with suppress(RuntimeError, ValueError):
        store = default_store()
        if store.check([_FAILURE_KEY]):
            return str(store.get(_FAILURE_KEY).decode())
    return "it ended without a word, or did not answer in time; see its own messages."
