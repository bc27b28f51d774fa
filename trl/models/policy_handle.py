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
    """The policy, whatever wraps it by the time it is read."""

    # The policy as it was prepared for training. Engines that shard weights replace it when
    # training begins, so nobody keeps what this returns.
    current: Callable[[], nn.Module]
    tokenizer: PreTrainedTokenizerBase
    ranks: Ranks  # all processes
    device: torch.device  # of the policy on this rank
    dtype: torch.dtype  # in which it computes
    # Log-probabilities, at the sampling temperature, of a completion after a prompt, both in token
    # ids; all ranks ask for them together.
    logps: Callable[[list[int], list[int]], list[float]]
    # Yields the bare policy in evaluation mode; all ranks enter and leave together.
    inference: Callable[[], AbstractContextManager[Any]]
    # Whether it is gathered layer by layer, so that all ranks must run layers equally often.
    layers_in_step: bool = False

    @property
    def model(self) -> nn.Module:
        """The policy as it is now."""
        return self.current()
