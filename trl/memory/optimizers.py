"""Bytes an optimizer keeps for the parameters it updates."""

from __future__ import annotations

from dataclasses import dataclass

from .model_size import ModelSize

FLOAT32 = 4


@dataclass(frozen=True)
class States:
    """What an optimizer keeps for each trainable parameter.

    Args:
        copies (`float`): tensors of the parameter's own dtype.
        size (`float`): bytes of states whose precision is the optimizer's own.
        factored (`bool`): one float32 entry for each row and column instead.
    """

    copies: float = 0.0
    size: float = 0.0
    factored: bool = False

    def total(self, model: ModelSize, weight_bytes: int) -> float:
        """Bytes for all trainable parameters, whose entries take `weight_bytes`."""
        rows = FLOAT32 * model.factored if self.factored else 0
        return rows + (self.copies * weight_bytes + self.size) * model.trainable


TWO = States(copies=2)
KNOWN = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_torch_xla"), TWO),
    **dict.fromkeys(("adamw_torch_npu_fused", "stable_adamw"), TWO),
    **dict.fromkeys(("paged_adamw_32bit",), States(size=8)),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), States(size=2)),
    "adamw_torch_8bit": States(size=2),
    "adamw_torch_4bit": States(size=1),
    **dict.fromkeys(("ademamix", "paged_ademamix_32bit"), States(size=12)),
    **dict.fromkeys(("ademamix_8bit", "paged_ademamix_8bit"), States(size=3)),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), States(size=4)),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), States(size=1)),
    **dict.fromkeys(("rmsprop", "adagrad"), States(copies=1)),
    **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_32bit"), States(size=4)),
    "rmsprop_bnb_8bit": States(size=1),
    "sgd": States(),
    "adafactor": States(factored=True),
}


def states_of(name: str, arguments: str | None = None) -> States | None:
    """What the optimizer of option `optim` keeps, or None if that is not known.

    Args:
        name (`str`): a value of `optim`.
        arguments (`str`, *optional*): `optim_args`, such as "momentum=0.9".
    """
    found = KNOWN.get(name)
    pairs = dict(pair.partition("=")[::2] for pair in (arguments or "").replace(" ", "").split(","))
    if name == "sgd" and float(pairs.get("momentum") or 0):
        return States(copies=1)
    return found


def state_bytes(name: str, arguments: str | None, model: ModelSize, weight_bytes: int) -> float:
    """Bytes of all states; those of an unknown optimizer are taken to be two in float32."""
    states = states_of(name, arguments) or States(size=2 * FLOAT32)
    return states.total(model, weight_bytes)
