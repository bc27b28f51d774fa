"""The last layer's feed-forward part, for no more tokens than those whose hidden states are read.

Its attention needs keys and values of every token, but nothing reads the last hidden states of
those that predict nothing: of a prompt, all but its last token. Their gradient is zero either way.
"""

import inspect
from typing import Any

from torch import Tensor, nn

from .packed_attention import KEYWORD
from .packed_places import Packing
from .unwrap import causal_model

MARK = "trl_reads_part"  # of a feed-forward part that has the hooks


class LastLayer:
    """Hooks by which the attention of a layer tells its feed-forward part what is read.

    They are called in turn in each forward: attention, before the feed-forward part, behind it.
    """

    def __init__(self) -> None:
        self._places: Tensor | None = None  # (n,) of the tokens that are read; None for all
        self._width = 0  # T, of all tokens

    def attention_begins(
        self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Note what is read of the layout that the attention is called with."""
        layout = kwargs.get(KEYWORD)
        self._places = layout.read if isinstance(layout, Packing) else None

    def feed_forward_begins(self, mlp: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        """Hand on the hidden states (1, T, H) that are read, as (1, n, H)."""
        if self._places is None:
            return args
        (states,) = args
        self._width = states.shape[1]
        # The gradient of `index_select` is added without sorting places.
        return (states.index_select(1, self._places),)

    def feed_forward_ends(self, mlp: nn.Module, args: tuple[Tensor], output: Any) -> Any:
        """Put the states (1, n, H) back where they were read; the others become zeros."""
        places, self._places = self._places, None
        if places is None:
            return output
        # Mixtures of experts may return what their router found as well, which nothing here reads.
        states, *others = output if isinstance(output, tuple) else (output,)
        whole = states.new_zeros(1, self._width, states.shape[2]).index_copy(1, places, states)
        return (whole, *others) if others else whole


def skip_unread(model: nn.Module) -> None:
    """Let the last layer of a model compute only what a packed layout reads, where it can."""
    layers = getattr(causal_model(model).base_model, "layers", None)
    last = layers[-1] if isinstance(layers, nn.ModuleList) and len(layers) else None
    attention = getattr(last, "self_attn", None)
    mlp = getattr(last, "mlp", None)
    if attention is None or mlp is None or hasattr(mlp, MARK):
        return
    if len(inspect.signature(mlp.forward).parameters) == 1:
        hooks = LastLayer()
        attention.register_forward_pre_hook(hooks.attention_begins, with_kwargs=True)
        mlp.register_forward_pre_hook(hooks.feed_forward_begins)
        mlp.register_forward_hook(hooks.feed_forward_ends)
        setattr(mlp, MARK, True)
