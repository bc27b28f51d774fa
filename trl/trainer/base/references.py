"""A reference policy that moves with the policy, and is saved and restored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from transformers.utils import logging

from ...distributed import Ranks, fsdp_version
from ...models.reference import AdapterOff, FrozenCopy, ReferencePolicy, frozen_pairs
from ..callbacks import SyncRefModelCallback
from .checkpoint import load

logger = logging.get_logger(__name__)

REFERENCE_FILE = "reference.pt"


class MovingReference(SyncRefModelCallback):
    """A reference that follows the policy (`sync_ref_model`), and is a file of checkpoints.

    It must have weights of its own, and be prepared for training. FSDP1 cuts trained and frozen
    weights at different places, so the copy of an adapter cannot follow there.
    """

    def __init__(self, reference: ReferencePolicy, accelerator: Accelerator):
        super().__init__(reference.model, accelerator)
        # The copy of an adapter is part of the policy, and so of its checkpoints.
        self._copy = reference if isinstance(reference, FrozenCopy) else None
        if isinstance(reference, AdapterOff) and reference.adapter is None:
            raise NotImplementedError(
                "sync_ref_model=True: the reference is the base model, which has no weights of its "
                "own that could move. Leave the option out, or pass a model that already has an "
                "adapter: its reference is a copy of that."
            )
        if self._copy is None and fsdp_version(accelerator) == 1:
            raise ValueError(
                "sync_ref_model=True: FSDP1 divides the copy of an adapter in another way than the "
                "adapter, so the copy cannot follow it. Train under FSDP2 (--accelerate_config "
                "fsdp2) or ZeRO-3 (--accelerate_config zero3), or leave the option out."
            )

    def _pairs(self, policy: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        # Of adapters the factors are blended, not the changes of weights that they stand for.
        return frozen_pairs(policy) if self._copy is None else super()._pairs(policy)

    def write(self, folder: str | Path, writes: bool) -> None:
        """Write its weights to a checkpoint; every rank calls this, for all take part."""
        if self._copy is None:
            return
        weights = self._copy.state_dict()  # of shards, which all ranks put together
        if writes:
            torch.save(weights, Path(folder) / REFERENCE_FILE)

    def read(self, folder: str | Path, ranks: Ranks) -> None:
        """Take over what `write` wrote, if every rank finds it."""
        path = Path(folder) / REFERENCE_FILE
        if self._copy is None:
            return
        if ranks.all(path.exists()):
            self._copy.load_state_dict(load(path))
        elif ranks.rank == 0:
            logger.warning(
                f"{folder} has no {REFERENCE_FILE}: the reference starts from the policy."
            )
