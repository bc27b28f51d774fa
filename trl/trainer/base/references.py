"""The reference policy of a trainer: made, moved if asked to, saved and restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import TrainerCallback
from transformers.utils import logging

from ...distributed import Ranks
from ...models.loading import load_policy
from ...models.reference import FrozenCopy, ReferencePolicy
from ..callbacks import SyncRefAdapterCallback, SyncRefModelCallback
from .base_config import BaseConfig
from .loop_state import load
from .policy import init_options
from .run_settings import fingerprint

logger = logging.get_logger(__name__)

REFERENCE_FILE = "reference.pt"


def load_reference(given: Any, model: Any, args: BaseConfig) -> nn.Module | None:
    """The reference policy that a trainer was given, loaded if it was given by name.

    Args:
        given (`str` or `PreTrainedModel`, *optional*): the reference.
        model: the policy, by name or loaded.
        args (`BaseConfig`): `model_init_kwargs`, which also hold for a reference given by name.

    Raises:
        ValueError: if the policy itself was given.
    """
    if isinstance(given, str):
        trust, many = args.trust_remote_code, args.world_size > 1
        given = load_policy(given, init_options(args), trust, distributed=many)
    elif given is not None and given is model:
        raise ValueError(
            "ref_model is the model that is trained: pass a model of its own, or leave it out for "
            "a copy."
        )
    return given


def facts_of_reference(reference: ReferencePolicy, args: BaseConfig) -> dict[str, Any]:
    """What a resumed run must share with the reference, which is not sharded yet."""
    if not isinstance(reference, FrozenCopy) or args.sync_ref_model:
        return {}
    weights = dict(reference.model.named_parameters())
    return {"the reference's weights (fingerprint)": fingerprint(weights)}


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
