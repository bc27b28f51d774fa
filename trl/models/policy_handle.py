"""What an engine that generates may know of the policy that trains."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..distributed import Ranks


@dataclass(frozen=True, kw_only=True)
class PolicyHandle:
    """The policy, whatever wraps it by the time it is read.

    Args:
        current: returns the policy as it was prepared for training. Engines that shard weights
            replace it when training begins, so nobody keeps what this returns.
        tokenizer: the policy's.
        ranks (`Ranks`): all processes.
        device (`torch.device`): where the policy lives on this rank.
        dtype (`torch.dtype`): in which it computes.
        logps: log-probabilities, at the sampling temperature, of a completion after a prompt, each
            given as token ids; all ranks ask for them together.
        inference: returns a context manager that yields the bare policy in evaluation mode, whole
            or one layer at a time; all ranks enter and leave it together.
        layers_in_step (`bool`): whether `inference` gathers one layer at a time, so that all ranks
            must run the policy's layers equally often.
    """

    current: Callable[[], nn.Module]
    tokenizer: PreTrainedTokenizerBase
    ranks: Ranks
    device: torch.device
    dtype: torch.dtype
    logps: Callable[[list[int], list[int]], list[float]]
    inference: Callable[[], AbstractContextManager[Any]]
    layers_in_step: bool = False

    @property
    def model(self) -> nn.Module:
        """The policy as it is now."""
        return self.current()
