"""The reference policy of the KL penalty: a frozen copy, or the policy without its adapter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from ..imports import is_available, require

REFERENCE_ADAPTER = "ref"


def is_peft_model(model: nn.Module) -> bool:
    """Whether `model` is wrapped by peft, without importing peft when nothing else did."""
    if not is_available("peft"):
        return False
    return isinstance(model, require("peft", "adapters").PeftModel)


def create_reference_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a frozen copy of `model` in evaluation mode.

    The copy is of the object passed in, edits in memory included; nothing is loaded again.
    """
    reference = copy.deepcopy(model)
    reference.requires_grad_(False)
    return reference.eval()


class FrozenCopy:
    """A separate frozen model.

    Args:
        model (`PreTrainedModel`): the policy to copy, before it is wrapped for training.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = create_reference_model(model)

    def to(self, device: torch.device) -> FrozenCopy:
        self.model.to(device)
        return self

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """Yield the model to score with."""
        yield self.model


class AdapterOff:
    """The policy itself, with its adapter switched off or replaced by a frozen one.

    Args:
        model (`PeftModel`): the policy.
        adapter (`str`, *optional*): name of a frozen adapter to activate; None: no adapter.
    """

    def __init__(self, model: nn.Module, adapter: str | None = None):
        self.model = model
        self.adapter = adapter

    def to(self, device: torch.device) -> AdapterOff:
        return self

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """Yield the model to score with; the trained adapter is back afterwards."""
        if self.adapter is None:
            with self.model.disable_adapter():
                yield self.model
            return
        trained = self.model.active_adapter
        self.model.set_adapter(self.adapter)
        try:
            yield self.model
        finally:
            # This also makes the trained adapter trainable, and the reference frozen, again.
            self.model.set_adapter(trained)


ReferencePolicy = FrozenCopy | AdapterOff


def make_reference(model: nn.Module, brought_adapter: bool) -> ReferencePolicy:
    """Choose the reference policy for `model`.

    Args:
        model: the policy, before it is wrapped for training.
        brought_adapter (`bool`): whether the caller passed a model that already had an adapter;
            its weights then belong to the reference, so they are copied into a frozen adapter.
    """
    if not is_peft_model(model):
        return FrozenCopy(model)
    if not brought_adapter:
        return AdapterOff(model)
    trained = model.active_adapter
    model.add_adapter(REFERENCE_ADAPTER, model.peft_config[trained])
    states = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in states.items():
            if f".{REFERENCE_ADAPTER}." in name or name.endswith(f".{REFERENCE_ADAPTER}"):
                parameter.copy_(states[_swap_adapter(name, trained)])
                parameter.requires_grad_(False)
    return AdapterOff(model, REFERENCE_ADAPTER)


def _swap_adapter(name: str, adapter: str) -> str:
    return ".".join(adapter if part == REFERENCE_ADAPTER else part for part in name.split("."))
