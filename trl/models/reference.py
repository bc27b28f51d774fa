"""The reference policy of the KL penalty: a frozen copy, or the policy without its adapter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..imports import is_available, require
from .reference_sharding import copy_weights, load_weights, spread, whole_weights

REFERENCE_ADAPTER = "ref"
# Values of init_lora_weights that take what the adapter starts with out of the base weights.
CHANGING_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")


def is_peft_model(model: nn.Module) -> bool:
    """Whether `model` is wrapped by peft, without importing peft when nothing else did."""
    if not is_available("peft"):
        return False
    return isinstance(model, require("peft", "adapters").PeftModel)


def create_reference_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a frozen copy of `model` in evaluation mode.

    The copy is of the object passed in, edits in memory included; nothing is loaded again. Weights
    that ZeRO-3 has partitioned stay so, and every process must call this.
    """
    return _frozen(copy_weights(model))


def _frozen(model: PreTrainedModel) -> PreTrainedModel:
    model.requires_grad_(False)
    return model.eval()


class FrozenCopy:
    """A separate frozen model.

    Args:
        model (`PreTrainedModel`): the policy to copy, before it is wrapped for training.
        copies (`bool`): False: the model is nobody else's, so it is frozen itself.
    """

    def __init__(self, model: PreTrainedModel, copies: bool = True):
        self.model = create_reference_model(model) if copies else _frozen(model)

    def prepare(self, accelerator: Accelerator) -> FrozenCopy:
        """Move the copy to where the policy will train, sharded as the policy will be."""
        self.model = spread(self.model, accelerator)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return all weights in main memory, on the main process at least; all must call it."""
        return dict(whole_weights(self.model))

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what `state_dict` returned; every process has it."""
        load_weights(self.model, state)

    @contextmanager
    def active(self, policy: nn.Module | None = None) -> Iterator[nn.Module]:
        """Yield the model to score with.

        Args:
            policy (*optional*): the policy as it was prepared for training.
        """
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

    def prepare(self, accelerator: Accelerator) -> AdapterOff:
        return self

    @contextmanager
    def active(self, policy: nn.Module | None = None) -> Iterator[nn.Module]:
        """Yield the model to score with; the trained adapter is back afterwards.

        Args:
            policy (*optional*): the policy as it was prepared for training; None: as it was before.
        """
        with _same_trainable(self.model), self._switched():
            yield self.model if policy is None else policy

    @contextmanager
    def _switched(self) -> Iterator[None]:
        if self.adapter is None:
            with self.model.disable_adapter():
                yield
            return
        trained = self.model.active_adapter
        self.model.set_adapter(self.adapter, inference_mode=True)
        try:
            yield
        finally:
            self.model.set_adapter(trained)


@contextmanager
def _same_trainable(model: nn.Module) -> Iterator[None]:
    """Switching adapters makes all of the active one trainable; leave what was frozen so."""
    known = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, flag in known:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)


ReferencePolicy = FrozenCopy | AdapterOff


def make_reference(
    model: nn.Module, brought_adapter: bool, given: PreTrainedModel | None = None
) -> ReferencePolicy:
    """Choose the reference policy for `model`.

    Args:
        model: the policy, before it is wrapped for training.
        brought_adapter (`bool`): whether the caller passed a model that already had an adapter;
            its weights then belong to the reference, so they are copied into a frozen adapter.
            So are those of an adapter whose initialization has changed the base weights.
        given (`PreTrainedModel`, *optional*): what is to be the reference; it is frozen.

    Raises:
        ValueError: if the adapter trains weights that are not its own, or its name is taken.
    """
    if given is not None:
        return FrozenCopy(given, copies=False)
    if not is_peft_model(model):
        return FrozenCopy(model)
    _check_bias(model)
    if not brought_adapter and not _changed_base(model):
        return AdapterOff(model)
    if REFERENCE_ADAPTER in model.peft_config:
        raise ValueError(
            f"The model has an adapter named {REFERENCE_ADAPTER!r}, the name of the frozen copy "
            "that is the reference: remove it with model.delete_adapter, or give it another name."
        )
    config = copy.copy(model.peft_config[model.active_adapter])
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # not one that changes the base weights once more
    with _same_trainable(model):
        model.add_adapter(REFERENCE_ADAPTER, config)
        with torch.no_grad():
            for frozen, current in frozen_pairs(model):
                frozen.copy_(current).requires_grad_(False)
    return AdapterOff(model, REFERENCE_ADAPTER)


def frozen_pairs(model: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Each weight of the frozen copy of an adapter, with the trained weight it is a copy of."""
    states = dict(model.named_parameters())
    for name, parameter in states.items():
        parts = name.split(".")
        if REFERENCE_ADAPTER in parts:
            own = [model.active_adapter if part == REFERENCE_ADAPTER else part for part in parts]
            yield parameter, states[".".join(own)]


def _check_bias(model: nn.Module) -> None:
    config = model.peft_config[model.active_adapter]
    bias = getattr(config, "bias", "none")
    if bias != "none":
        raise ValueError(
            f"bias={bias!r} trains biases of the base model, so no reference is left for the KL "
            "penalty: use bias='none' in the adapter's configuration, or beta=0."
        )


def _changed_base(model: nn.Module) -> bool:
    start = getattr(model.peft_config[model.active_adapter], "init_lora_weights", True)
    return isinstance(start, str) and start.startswith(CHANGING_STARTS)
