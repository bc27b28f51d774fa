"""Ranks that run the layers of a model together, because each holds a part of every layer.

Lengths of completions, batches and checks differ. So every forward begins with an agreement to run
one, and a rank without work of its own runs along until all are done.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...distributed import RankError, Ranks


class SyncedForward:
    """Makes all ranks run a decoder equally often."""

    def __init__(self, ranks: Ranks, device: torch.device):
        self._ranks = ranks
        self._device = device
        self._is_inside = False  # within a forward, or one did not end
        self._is_done = False  # with its own work
        self._failure: BaseException | None = None  # of a forward, for whoever tries another

    @contextmanager
    def over(self, decoder: nn.Module) -> Iterator[None]:
        """Work of this rank that runs `decoder` as often as it needs to, with the others.

        `RankError`: another rank failed between two forwards. A failure within a forward, where
        others wait for this rank's part of the next layer, ends this process alone.
        """
        self._is_inside = self._is_done = False
        self._failure = None
        before = decoder.register_forward_pre_hook(self._enter, prepend=True)
        with before, decoder.register_forward_hook(self._leave, always_call=True):
            try:
                yield
            except Exception as error:
                if not self._is_inside and not isinstance(error, RankError):
                    self._agree(failure=error)
                raise
            self._is_done = True
            token = torch.zeros(1, 1, dtype=torch.long, device=self._device)
            while self._agree():
                decoder(input_ids=token, use_cache=False)

    def _enter(self, *ignored: Any) -> None:
        if self._is_done:
            return
        if self._is_inside:
            words = f"{type(self._failure).__name__}: {self._failure}"
            raise ValueError(
                f"A forward failed on this rank while other ranks took part in it ({words}). Try "
                "shared_prefix=False, or ds3_gather_for_generation=True."
            ) from self._failure
        self._agree(goes_on=True)
        self._is_inside = True

    def _leave(self, decoder: nn.Module, args: Any, output: Any) -> None:
        if output is not None:
            self._is_inside = False
        elif self._failure is None:  # torch calls this while it handles what the forward raised
            self._failure = sys.exc_info()[1]

    def _agree(self, goes_on: bool = False, failure: Exception | None = None) -> bool:
        """Whether a rank goes on; raises on every rank if one failed."""
        votes = torch.tensor([int(goes_on), int(failure is not None)], device=self._device)
        going, failed = self._ranks.sum(votes).tolist()
        if failed:
            self._ranks.raise_everywhere(failure, "generation")
        return bool(going)
