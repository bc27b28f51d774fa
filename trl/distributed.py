"""The few collectives a training step needs, over accelerate, and how ranks fail together."""

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

from .timed_calls import FAILURES, Outcome
from .torch_internals import default_store

PATIENCE = 5.0  # seconds in which a launcher meets the rank that failed before those it took along

# How the backends of torch.distributed report that another rank is gone or silent.
_LOST = re.compile(r"gloo/|NCCL|c10d")
_KEY = "trl/failed"
T = TypeVar("T")


class RankError(Exception):
    """Another rank failed. Not a `RuntimeError`: it must not be taken for a failure of this one."""


class Ranks:
    """Gathers values over the processes of an accelerator, if given, and spreads failures."""

    def __init__(self, accelerator: Accelerator | None = None, per_row: int = 1):
        self._accelerator: Any = accelerator
        self.per_row = per_row  # neighboring ranks that divide the tokens of each row among them
        self.rank: int = 0 if accelerator is None else accelerator.process_index
        self.count: int = 1 if accelerator is None else accelerator.num_processes
        self._kind = getattr(accelerator, "distributed_type", DistributedType.NO)
        self._is_watched = False
        # This rank's share of the rows, and how many shares there are.
        self.place: tuple[int, int] = (self.rank // per_row, self.count // per_row)
        # Whether something besides this process takes part in its passes, even an engine alone.
        self.is_distributed: bool = self._kind != DistributedType.NO
        # Whether ranks may run different numbers of passes.
        self.pass_alone = self._kind not in (DistributedType.FSDP, DistributedType.DEEPSPEED)

    @property
    def share_weights(self) -> bool:
        """Whether each rank holds only a part of the weights: FSDP, or DeepSpeed ZeRO-3."""
        if self._kind == DistributedType.DEEPSPEED:
            return bool(self._accelerator.state.deepspeed_plugin.zero_stage == 3)
        return self._kind == DistributedType.FSDP

    @property
    def fsdp_version(self) -> int | None:
        """1 or 2; None without FSDP."""
        plugin = getattr(getattr(self._accelerator, "state", None), "fsdp_plugin", None)
        return None if plugin is None else int(plugin.fsdp_version)

    def row_group(self) -> Any:
        """Make the process group of the ranks that have the same rows as this one."""
        if self.count % self.per_row:
            raise ValueError(
                f"cp_size (or sp_size), {self.per_row}, must be a divisor of the number of "
                f"processes, {self.count}."
            )
        return torch.distributed.new_subgroups(self.per_row)[0]

    def wait(self) -> None:
        """Wait until every rank is here."""
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()

    def gather(self, rows: Tensor) -> Tensor:
        """Concatenate values (B, ...) of all ranks' rows in rank order: (N, ...), on the device."""
        rows = self._on_device(rows)
        return rows if self.count == 1 else self._accelerator.gather(rows.contiguous())

    def sum(self, value: Tensor) -> Tensor:
        """Add a tensor up over all ranks: on the device."""
        value = self._on_device(value)
        return value if self.count == 1 else self._accelerator.reduce(value, reduction="sum")

    def _on_device(self, value: Tensor) -> Tensor:
        return value if self._accelerator is None else value.to(self._accelerator.device)

    def all(self, flag: bool) -> bool:
        """Whether something holds on every rank."""
        return flag if self.count == 1 else int(self.sum(torch.tensor(int(flag)))) == self.count

    def largest(self, value: float) -> float:
        """The largest of the numbers that the ranks give; NaN if one of them is."""
        return float(torch.tensor(self.gather_objects(value), dtype=torch.float64).max())

    def gather_objects(self, value: Any) -> list[Any]:
        """Return one picklable object from each rank, in rank order, on every rank."""
        return [value] if self.count == 1 else gather_object([value])

    def computed_on_first(self, compute: Callable[[], T], what: str) -> T:
        """Compute something picklable on rank 0 alone, and return it on every rank.

        If that fails, all ranks raise an error; see `fail_together`.
        """
        values: list[Any] = [None]
        with self.fail_together(what):
            if self.rank == 0:
                values = [compute()]
        if self.count > 1:
            broadcast_object_list(values)
        return values[0]

    def objects_on_first(self, value: Any) -> list[Any]:
        """Return one picklable object from each rank, in rank order, on rank 0; elsewhere none."""
        if self.count == 1:
            return [value]
        found = [None] * self.count if self.rank == 0 else None
        torch.distributed.gather_object(value, found)
        return found or []

    def local(self, rows: Tensor) -> Tensor:
        """Return this rank's share (B, ...) of gathered rows (N, ...)."""
        size = rows.shape[0] // self.count
        return rows[self.rank * size : (self.rank + 1) * size]

    @contextmanager
    def fail_together(self, what: str) -> Iterator[None]:
        """Raise everywhere what the work inside, which must not communicate, raises on one rank."""
        failure = None
        try:
            yield
        except RankError:  # of which all ranks know
            raise
        except FAILURES as error:
            failure = error
        self.raise_everywhere(failure, what)

    def raise_everywhere(self, failure: BaseException | None, what: str) -> None:
        """Raise a rank's failure in `what`, if any, and on others a `RankError`; all call this."""
        words = None if failure is None else Outcome(failure=failure).words
        messages = self.gather_objects(words)
        if failure is not None:
            raise failure
        for rank, message in enumerate(messages):
            if message is not None:
                raise RankError(f"Rank {rank} failed in {what}: {message}")

    @contextmanager
    def propagate_failures(self) -> Iterator[None]:
        """Name the rank in an error that ends this process, and what took it along.

        Collectives of the others then fail, at once or after `ddp_timeout`. They wait a moment, for
        a launcher to meet the first failure first, and raise a `RankError` that names it.
        """
        if self._is_watched or self.count == 1:
            yield
            return
        self._is_watched = True
        try:
            yield
        except Exception as error:
            is_told = isinstance(error, RankError)
            is_lost = not is_told and _is_lost(error)
            if (is_told or is_lost) and "TORCHELASTIC_RUN_ID" in os.environ:
                time.sleep(PATIENCE)
            if is_lost:
                raise RankError(f"Rank {self.rank} lost contact with a rank: {_told()}") from error
            if is_told:
                raise
            with suppress(RuntimeError, ValueError):  # where the ranks met may be gone
                words = f"rank {self.rank} failed: {Outcome(failure=error).words}"
                default_store().set(_KEY, words)
            error.add_note(f"This was rank {self.rank} of {self.count}.")
            raise
        finally:
            self._is_watched = False


@contextmanager
def undivided_models() -> Iterator[None]:
    """Models that are built inside are whole, though ZeRO-3 would divide those of training."""
    reference = deepspeed._hf_deepspeed_config_weak_ref
    config = None if reference is None else reference()
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if config is not None:
            deepspeed.set_hf_deepspeed_config(config)


def _is_lost(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, comes from a collective."""
    if error is None:
        return False
    names_it = isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
    is_own = names_it or isinstance(error, torch.distributed.DistError)
    return is_own or _is_lost(error.__cause__ or error.__context__)


def _told() -> str:
    """What the last rank that failed has said."""
    with suppress(RuntimeError, ValueError):
        store = default_store()
        if store.check([_KEY]):
            return str(store.get(_KEY).decode())
    return "it ended without a word, or did not answer in time; see its own messages."
