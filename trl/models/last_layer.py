"""Run the MLP of the last layer only on tokens whose hidden states are read.

The last attention needs keys and values of every token. But nothing reads the last hidden states of
tokens that predict nothing, which are all tokens of a prompt but its last. Their gradient is zero
either way.
"""

import inspect
from typing import Any

from torch import Tensor, nn

from .packed_attention import KEYWORD
from .packed_row import Packing
from .unwrap import causal_model


class LastLayerHooks:
    """Hooks that pass the indices of read tokens from the attention of a layer to its MLP.

    In each forward they are called in this order: `before_attention`, `before_mlp`, `after_mlp`.
    """

    def __init__(self) -> None:
        self._read_indices: Tensor | None = None  # (n,) of tokens that are read; None: all are
        self._width = 0  # T, all tokens

    def before_attention(
        self, attention: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> None:
        """Store which tokens of the layout are read."""
        layout = kwargs.get(KEYWORD)
        self._read_indices = layout.read_indices if isinstance(layout, Packing) else None

    def before_mlp(self, mlp: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        """Select the hidden states that are read: (1, T, H) to (1, n, H)."""
        if self._read_indices is None:
            return args
        (states,) = args
        self._width = states.shape[1]
        # The backward pass of `index_select` does not sort the indices.
        return (states.index_select(1, self._read_indices),)

    def after_mlp(
        self, mlp: nn.Module, args: tuple[Tensor], output: Tensor | tuple[Tensor, ...]
    ) -> Tensor | tuple[Tensor, ...]:
        """Scatter the states (1, n, H) to their tokens (1, T, H); the others are zeros."""
        indices = self._read_indices
        self._read_indices = None
        if indices is None:
            return output
        # Mixtures of experts may also return router outputs, which nothing here reads.
        states, *router_outputs = output if isinstance(output, tuple) else (output,)
        zeros = states.new_zeros(1, self._width, states.shape[2])
        all_states = zeros.index_copy(1, indices, states)
        return (all_states, *router_outputs) if router_outputs else all_states


def skip_unread(model: nn.Module) -> None:
    """Let the last layer of a model run its MLP only on tokens that are read, if it can.

    It can if the layer has a `self_attn` and an `mlp` of one argument. Hooks are added once.
    """
    layers = getattr(causal_model(model).base_model, "layers", None)
    last = layers[-1] if isinstance(layers, nn.ModuleList) and len(layers) else None
    attention = getattr(last, "self_attn", None)
    mlp = getattr(last, "mlp", None)
    if attention is None or mlp is None or hasattr(mlp, "trl_skips_unread"):
        return
    if len(inspect.signature(mlp.forward).parameters) == 1:
        hooks = LastLayerHooks()
        attention.register_forward_pre_hook(hooks.before_attention, with_kwargs=True)
        mlp.register_forward_pre_hook(hooks.before_mlp)
        mlp.register_forward_hook(hooks.after_mlp)
        mlp.trl_skips_unread = True
