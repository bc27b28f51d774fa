"""Value models: a linear layer on the policy's hidden states, or a separate classifier.

The value model is a submodule of the policy, so that one engine shards and trains both, one forward
serves both, and checkpoints hold both. The policy does not use it: it is saved beside the policy,
and generation engines never see it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .layout_check import why_not_shared
from .loading import context_length
from .packed_attention import install
from .readers import Hidden, Reader
from .unwrap import VALUE_MODEL, Capture, causal_model, score_layer

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class ValueReader(Reader):
    """Computes values by a linear layer from H to 1, in the layer's own dtype without autocast.

    Values are (B, C), each at the position before a completion token, 0 beyond a completion's end.
    With `at_last_token` they are (B,), at the last token of each row, 0 for rows without tokens.
    """

    module: nn.Module  # the layer
    at_last_token: bool = False
    decoder: nn.Module | None = None  # runs on the same tokens; None: the policy's hidden states
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


def add_value_model(policy: nn.Module, model: nn.Module | None, device: torch.device) -> None:
    """Add a value model to a policy that is not wrapped yet.

    It is a sequence classifier with one label, by default a linear layer whose weights are 0.
    """
    causal = causal_model(policy)
    if model is None:
        dtype = next(p.dtype for p in policy.parameters() if p.requires_grad)
        model = nn.Linear(causal.config.get_text_config().hidden_size, 1, dtype=dtype)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    else:
        layer = score_layer(model)
        if layer is None or getattr(layer, "out_features", 1) != 1:
            raise TypeError(
                "value_model must be a sequence classifier with one label (AutoModelForSequence"
                f"Classification, num_labels=1), not {type(model).__name__}."
            )
    causal.add_module(VALUE_MODEL, model.to(device).train())


def _value_model(policy: nn.Module) -> nn.Module:
    return causal_model(policy).get_submodule(VALUE_MODEL)


def value_reader(policy: nn.Module) -> Reader:
    """Make the reader of values (B, C) for a policy with a value model."""
    model = _value_model(policy)
    if not hasattr(model, "config"):
        return ValueReader(model)
    # Only the policy is checked for whether it may share prompts, so both must be of one class.
    same_class = type(model.base_model) is type(causal_model(policy).base_model)
    can_pack = same_class and why_not_shared(model, context_length(model) or 0) is None
    if can_pack:
        install(model)  # its attention implementation may differ from the policy's
    return ValueReader(model.score, decoder=model.base_model, can_pack=can_pack)


def split_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a policy's state dict into its own and that of its value model, without prefix."""
    policy: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, weight in state.items():
        _, is_value, value_name = f".{name}".partition(f".{VALUE_MODEL}.")
        if is_value:
            values[value_name] = weight
        else:
            policy[name] = weight
    return policy, values


def save_values(policy: nn.Module, weights: Mapping[str, Tensor], folder: str | Path) -> None:
    """Save the weights of a value model, and its configuration if it has one, beside a policy."""
    value_folder = Path(folder) / VALUE_MODEL
    value_folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    save_file(tensors, value_folder / WEIGHTS, metadata={"format": "pt"})
    model = _value_model(policy)
    if hasattr(model, "config"):
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(value_folder)


def load_values(policy: nn.Module, folder: str | Path) -> None:
    """Load what `save_values` wrote; a ValueError if it is missing from the folder."""
    path = Path(folder) / VALUE_MODEL / WEIGHTS
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {VALUE_MODEL}/{WEIGHTS}: its run trained no value model."
        )
    _value_model(policy).load_state_dict(load_file(path))


@contextmanager
def without_values(policy: nn.Module) -> Iterator[None]:
    """Remove the value model from its policy inside the block."""
    causal = causal_model(policy)
    value_model = _value_model(policy)
    delattr(causal, VALUE_MODEL)
    try:
        yield
    finally:
        causal.add_module(VALUE_MODEL, value_model)
