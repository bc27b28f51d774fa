"""The last layer's feed-forward part, for no more tokens than those whose hidden states are read.

Its attention needs keys and values of every token, but nothing reads the last hidden states of
those that predict nothing: of a prompt, all but its last token. Their gradient is zero either way.
"""

import inspect
import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .packed_places import Packing
from .unwrap import causal_model


@dataclass
class _Reading:
    """What an attention tells the feed-forward part behind it, which is called next."""

    places: Tensor | None = None  # (n,), None for all
    taken: tuple[Tensor, int] | None = None  # while they are computed: those, and T


_readings = weakref.WeakKeyDictionary[nn.Module, _Reading]()  # of both parts of last layers


def skip_unread(model: nn.Module) -> None:
    """Let the last layer compute only what a packed layout reads, if its attention will `tell`."""
    layers = getattr(causal_model(model).base_model, "layers", None)
    last = layers[-1] if isinstance(layers, nn.ModuleList) and len(layers) else None
    attention, mlp = getattr(last, "self_attn", None), getattr(last, "mlp", None)
    if attention is None or mlp is None or attention in _readings:
        return
    if len(inspect.signature(mlp.forward).parameters) == 1:
        _readings[attention] = _readings[mlp] = _Reading()
        mlp.register_forward_pre_hook(_take)
        mlp.register_forward_hook(_put)


def tell(attention: nn.Module, layout: Any) -> None:
    """Note what is read of the layout that an attention is called with."""
    if attention in _readings:
        _readings[attention].places = layout.read if isinstance(layout, Packing) else None


def _take(mlp: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    reading = _readings.get(mlp, _Reading())  # a copy of a model has the hooks, and tells nothing
    (states,), places = args, reading.places
    reading.places, reading.taken = None, None
    if places is None:
        return args
    reading.taken = places, states.shape[1]
    return (states.index_select(1, places),)  # whose gradient is added without sorting places


def _put(mlp: nn.Module, args: tuple[Tensor], found: Any) -> Any:
    reading = _readings.get(mlp, _Reading())
    if reading.taken is None:
        return found
    (places, width), reading.taken = reading.taken, None
    # Mixtures of experts may return what their router found as well, which nothing here reads.
    states, *rest = found if isinstance(found, tuple) else (found,)
    states = states.new_zeros(1, width, states.shape[2]).index_copy(1, places, states)
    return (states, *rest) if rest else states
