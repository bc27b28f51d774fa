"""The reference policy of a trainer: loaded if it is given, moved if asked to, saved, restored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ...distributed import Ranks, fsdp_version
from ...models.loading import disable_dropout_in_model, load_policy
from ...models.reference import AdapterOff, FrozenCopy, ReferencePolicy, frozen_pairs
from ..callbacks import SyncRefModelCallback
from .checkpoint import load
from .policy import init_options
from .resuming import fingerprint

logger = logging.get_logger(__name__)

REFERENCE_FILE = "reference.pt"


def load_reference(given: Any, model: Any, args: Any) -> PreTrainedModel | None:
    """The reference that a trainer was given, loaded if it was given by name; None if none was."""
    if given is None:
        return None
    if given is model and not isinstance(given, str):
        raise ValueError(
            "ref_model is the model that is trained, so it would move along. Leave it out: a "
            "frozen copy is made."
        )
    if isinstance(given, str):
        options = dict(args.ref_model_init_kwargs or init_options(args))
        trust, many = args.trust_remote_code, args.world_size > 1
        given = load_policy(given, options, trust, distributed=many)
    if not isinstance(given, nn.Module) or not hasattr(given, "config"):
        raise TypeError(
            f"ref_model must be a name or a transformers model, not {type(given).__name__}."
        )
    disable_dropout_in_model(given)
    return given


def facts_of_reference(reference: ReferencePolicy) -> dict[str, Any]:
    """What a resumed run must share with a reference that stays, before it is sharded."""
    if not isinstance(reference, FrozenCopy):
        return {}
    weights = dict(reference.model.named_parameters())
    return {"the reference's weights (fingerprint)": fingerprint(weights)}


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
