"""Ranks that run a model's layers in lockstep, because each holds a shard of every layer.

Ranks need different numbers of forwards, for completions, batches and checks. So all ranks vote
before each forward, and a rank that has finished its own work runs forwards with a dummy input
until all ranks have finished.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ...distributed import RankError, Ranks


class SyncedForward:
    """Makes all ranks run a decoder equally often."""

    def __init__(self, ranks: Ranks, device: torch.device):
        self._ranks = ranks
        self._device = device
        self._is_inside = False  # a forward is running, or one failed
        self._is_done = False  # this rank has finished its own work
        self._failure: BaseException | None = None  # of a forward

    @contextmanager
    def over(self, decoder: nn.Module) -> Iterator[None]:
        """Let this rank run `decoder` inside the block as often as it needs, in lockstep.

        Raises `RankError` if another rank failed between two forwards. If this rank fails within a
        forward, only its own process raises: other ranks wait for its shard of the next layer.
        """
        self._is_inside = False
        self._is_done = False
        self._failure = None
        before = decoder.register_forward_pre_hook(self._before_forward, prepend=True)
        after = decoder.register_forward_hook(self._after_forward, always_call=True)
        with before, after:
            try:
                yield
            except Exception as error:
                if not self._is_inside and not isinstance(error, RankError):
                    self._vote(failure=error)
                raise
            self._is_done = True
            token = torch.zeros(1, 1, dtype=torch.long, device=self._device)
            while self._vote():
                decoder(input_ids=token, use_cache=False)

    def _before_forward(self, *hook_args: object) -> None:
        if self._is_done:
            return
        if self._is_inside:
            raise ValueError(
                "A forward failed on this rank while other ranks took part in it "
                f"({type(self._failure).__name__}: {self._failure}). Try shared_prefix=False, or "
                "ds3_gather_for_generation=True."
            ) from self._failure
        self._vote(runs_forward=True)
        self._is_inside = True

    def _after_forward(self, decoder: nn.Module, args: object, output: object) -> None:
        if output is not None:
            self._is_inside = False
        elif self._failure is None:  # torch calls the hook while it handles the forward's error
            self._failure = sys.exc_info()[1]

    def _vote(self, runs_forward: bool = False, failure: Exception | None = None) -> bool:
        """Return whether any rank runs a forward. If a rank failed, raise on all ranks."""
        votes = torch.tensor([int(runs_forward), int(failure is not None)], device=self._device)
        num_running, num_failed = self._ranks.sum(votes).tolist()
        if num_failed:
            self._ranks.raise_everywhere(failure, "generation")
        return bool(num_running)
