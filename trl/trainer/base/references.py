"""The reference policy of a trainer: made, moved if asked to, saved and restored."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import TrainerCallback
from transformers.utils import logging

from ...distributed import Ranks
from ...models.reference import FrozenCopy, ReferencePolicy
from ..callbacks import SyncRefAdapterCallback, SyncRefModelCallback
from .loop_state import load

logger = logging.get_logger(__name__)

REFERENCE_FILE = "reference.pt"


def follower(reference: ReferencePolicy, accelerator: Accelerator) -> TrainerCallback:
    """What moves a reference towards the policy (`sync_ref_model`).

    Raises:
        NotImplementedError: if the reference has no weights of its own.
    """
    if isinstance(reference, FrozenCopy):
        return SyncRefModelCallback(reference.model, accelerator)
    if reference.adapter is None:
        raise NotImplementedError(
            "sync_ref_model=True: the reference is the base model, which has no weights of its "
            "own that could move. Leave the option out, or pass a model that already has an "
            "adapter: its reference is a copy of that."
        )
    return SyncRefAdapterCallback(reference.model, accelerator)


def write_reference(reference: FrozenCopy, folder: str | Path, writes: bool) -> None:
    """Write the weights of a reference that moves; every rank calls this, some write."""
    weights = reference.state_dict()
    if writes:
        torch.save(weights, Path(folder) / REFERENCE_FILE)


def read_reference(reference: FrozenCopy, folder: str | Path, ranks: Ranks) -> None:
    """Take over what `write_reference` wrote, if every rank finds it."""
    path = Path(folder) / REFERENCE_FILE
    if ranks.all(path.exists()):
        reference.load_state_dict(load(path))
    elif ranks.rank == 0:
        logger.warning(f"{folder} has no {REFERENCE_FILE}: the reference starts from the policy.")
