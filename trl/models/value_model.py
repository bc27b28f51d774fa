"""Values of what a policy has written so far, from a layer on its hidden states or another model.

The value model is part of the policy, so that one engine shards and trains both, one forward
serves both, and checkpoints hold both. It has no part in what the policy computes: it is stored
beside the policy, and engines that generate never see it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .layout_check import why_not_shared
from .loading import context_length
from .packed_attention import install
from .scorer import Hidden, Reader
from .unwrap import VALUE_MODEL, Capture, causal_model, score_layer

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class ValueReader(Reader):
    """Values by a linear layer from H to 1, in its own precision whatever autocast says."""

    module: nn.Module  # a part of the model that is scored
    # (B,) at the last token of each row, 0 for rows without tokens; else (B, C), at the place
    # before each completion token, 0 beyond a completion's end.
    at_last_token: bool = False
    decoder: Any = None  # which reads the same tokens; None: that of the policy
    can_pack: bool = True
    quantity = "values"
    compares_relatively = True

    def __call__(self, hidden: Hidden) -> tuple[Tensor]:
        """Read (values,)."""
        layout = hidden.layout
        if self.decoder is not None:
            hidden = Hidden(layout, Capture(self.decoder(**layout.inputs, use_cache=False)[0]))
        states = hidden.at(layout.ends if self.at_last_token else layout.sources)
        parameter = next(self.module.parameters(), states)
        with torch.autocast(states.device.type, enabled=False):
            values = self.module(states.to(parameter.dtype)).squeeze(-1)
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        return (layout.by_row(values) if self.at_last_token else layout.scatter(values),)


def add_value_model(policy: nn.Module, given: nn.Module | None, device: torch.device) -> None:
    """Make a classifier with one label, or a layer of zeros, part of a policy not wrapped yet."""
    causal = causal_model(policy)
    if given is None:
        dtype = next(p.dtype for p in policy.parameters() if p.requires_grad)
        given = nn.Linear(causal.config.get_text_config().hidden_size, 1, dtype=dtype)
        for parameter in given.parameters():
            nn.init.zeros_(parameter)
    elif (layer := score_layer(given)) is None or getattr(layer, "out_features", 1) != 1:
        raise TypeError(
            "value_model must be a sequence classifier with one label (AutoModelForSequence"
            f"Classification, num_labels=1), not {type(given).__name__}."
        )
    causal.add_module(VALUE_MODEL, given.to(device).train())


def value_reader(policy: nn.Module) -> Reader:
    """What reads values (B, C) in a forward of a policy with a value model."""
    causal = causal_model(policy)
    found: Any = getattr(causal, VALUE_MODEL)
    if not hasattr(found, "config"):
        return ValueReader(found)
    # Both see the same layout, which is compared with plain rows for the policy alone.
    alike = type(found.base_model) is type(causal.base_model)
    packs = alike and why_not_shared(found, context_length(found) or 0) is None
    if packs:
        install(found)  # its attention need not be implemented as that of the policy is
    return ValueReader(found.score, decoder=found.base_model, can_pack=packs)


def split_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split the weights of a policy into its own and those of its value model, with plain names."""
    policy, values = {}, {}
    for name, weight in state.items():
        _, found, rest = f".{name}".partition(f".{VALUE_MODEL}.")
        if found:
            values[rest] = weight
        else:
            policy[name] = weight
    return policy, values


def save_values(policy: nn.Module, weights: Mapping[str, Tensor], folder: str | Path) -> None:
    """Write the weights of a value model, and the configuration if it has one, beside a policy."""
    place = Path(folder) / VALUE_MODEL
    place.mkdir(parents=True, exist_ok=True)
    whole = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    save_file(whole, place / WEIGHTS, metadata={"format": "pt"})
    model: Any = getattr(causal_model(policy), VALUE_MODEL)
    if hasattr(model, "config"):
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(place)


def load_values(policy: nn.Module, folder: str | Path) -> None:
    """Load what `save_values` wrote; ValueError if the folder has none of it."""
    place = Path(folder) / VALUE_MODEL / WEIGHTS
    if not place.is_file():
        raise ValueError(
            f"{folder} has no {VALUE_MODEL}/{WEIGHTS}: its run trained no value model."
        )
    getattr(causal_model(policy), VALUE_MODEL).load_state_dict(load_file(place))


@contextmanager
def without_values(policy: nn.Module) -> Iterator[None]:
    """Take the value model out of its policy, inside the block only."""
    causal = causal_model(policy)
    value_model = getattr(causal, VALUE_MODEL)
    delattr(causal, VALUE_MODEL)
    try:
        yield
    finally:
        causal.add_module(VALUE_MODEL, value_model)
