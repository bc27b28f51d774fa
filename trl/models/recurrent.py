"""Recurrent layers: run once over a shared prompt, then over its tails from the prompt's state.

In transformers such layers read their state from a cache and write the last one back. Here they are
called once for each prefix, and once for all tails of similar length, with caches that write
nothing in place. So gradients flow from every tail into the prefix.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .packed_attention import KEYWORD, Decoding
from .packed_row import Packing, States
from .patches import wrap_class_forward
from .unwrap import causal_model, mentions

# Runs a layer on tokens (n, T, H) from given states: outputs (n, T, H), and the states behind them.
Run = Callable[..., tuple[Tensor, States]]


class RecurrentStateCache:
    """A cache that gives layers the states (n, ...) of n rows and holds the last ones they write.

    It has the methods of transformers' caches that recurrent layers call.
    """

    def __init__(self, states: States | None = None):
        self.states = dict(states or {})

    def is_recording_past(self, layer_idx: int) -> bool:
        """Always True: layers then avoid the kernels that update the state of a token in place."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs (n, W, size) of a convolution."""
        return self.states.get(("inputs", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(("state", layer_idx, state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> Tensor:
        """Append inputs; return all inputs that the convolution reads."""
        size = options.get("conv_kernel_size") or conv_states.shape[-1]
        previous = self.get_conv_state(layer_idx, state_idx)
        inputs = conv_states if previous is None else torch.cat([previous, conv_states], -1)
        # Negative padding crops, and copies, so the whole row is not kept alive.
        self.states["inputs", layer_idx, state_idx] = pad(inputs, (size - inputs.shape[-1], 0))
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **unused: object
    ) -> Tensor:
        self.states["state", layer_idx, state_idx] = recurrent_states
        return recurrent_states


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that read states from a cache."""
    names = ("update_conv_state", "update_recurrent_state")
    modules = causal_model(model).modules()
    return [module for module in modules if mentions(module.__class__, *names)]


# The layers that received a layout, whose results are checked; None outside `checked_states`.
_checked_layers: ContextVar[set[nn.Module] | None] = ContextVar("checked_layers", default=None)


@contextmanager
def checked_states(model: nn.Module) -> Iterator[None]:
    """Let recurrent layers follow layouts, and check that all of them continue from states."""
    layers = recurrent_layers(model)
    for layer in layers:
        wrap_class_forward(layer, _follow_layouts)
    checked = set[nn.Module]()
    token = _checked_layers.set(checked)
    try:
        yield
    finally:
        _checked_layers.reset(token)
    if len(checked) < len(layers):
        raise RuntimeError("its recurrent layers do not receive the packed layout")


def _check_state(run: Run, packing: Packing, hidden: Tensor, outputs: Tensor) -> None:
    """Compare the last tail of each group with that of one run over prefix and tail."""
    for group in packing.groups:
        if packing.only_tails or not group.tails:
            continue
        tail = slice(*group.tails[-1])
        prefix = range(group.prefix.start, group.prefix.stop)
        indices = [*prefix, *range(tail.start, tail.stop)]
        expected = run(hidden[:, indices])[0][:, len(prefix) :]
        difference = (expected - outputs[:, tail]).float().norm() / expected.float().norm()
        if not difference <= torch.finfo(outputs.dtype).eps ** 0.5:
            raise RuntimeError("its recurrent layers do not continue from a given state")


def _follow_layouts(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    if hasattr(original, "trl_original"):
        return original
    parameters = inspect.signature(original).parameters
    names = [name for name in ("cache_params", "past_key_values") if name in parameters]
    cache_name = names[0] if names else "cache"

    @functools.wraps(original)
    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layout = kwargs.pop(KEYWORD, None)
        if layout is None or isinstance(layout, Decoding):
            return original(self, hidden_states, *args, **kwargs)
        if not isinstance(layout, Packing):
            raise NotImplementedError("Recurrent layers do not support this layout.")

        def run(tokens: Tensor, states: States | None = None) -> tuple[Tensor, States]:
            cache = RecurrentStateCache(states)
            changes = {"attention_mask": None, cache_name: cache}
            return original(self, tokens, **kwargs | changes), cache.states

        outputs = _run_packed(run, layout, hidden_states, getattr(self, "layer_idx", id(self)))
        checked = _checked_layers.get()
        if checked is not None:
            checked.add(self)
            _check_state(run, layout, hidden_states, outputs)
        return outputs

    forward.trl_original = original  # type: ignore[attr-defined]
    return forward


def _run_packed(run: Run, packing: Packing, hidden: Tensor, layer: int) -> Tensor:
    """Outputs (1, T, H) of a layer: of prefixes one by one, then of tails from their end states."""
    outputs: list[Tensor] = []
    indices: list[Tensor] = []  # of the outputs in the row
    end_states: dict[int, States] = {}  # after prefixes, by where these begin
    # Without prefixes in the row, they lie behind it: see `Packing`.
    shift = hidden.shape[1] if packing.only_tails else 0
    cached_states = {} if packing.cache is None else packing.cache.states
    for group in packing.groups_with_prefix:
        start = group.prefix.start
        key = (layer, start - shift)
        if packing.only_tails:
            end_states[start] = cached_states[key]
        else:
            output, end_states[start] = run(hidden[:, group.prefix])
            cached_states.setdefault(key, end_states[start])  # recomputing must not replace it
            outputs.append(output[0])
            indices.append(torch.arange(start, group.prefix.stop, device=hidden.device))
    for call in packing.attention_calls():
        if call.real_indices is None or isinstance(call.queries, slice):
            continue
        tokens = hidden[0][call.queries]
        width = call.queries.shape[1]
        if width == 1:  # for a single token, layers would run their decoding step, in place
            tokens = tokens.expand(-1, 2, -1)
        output, _ = run(tokens, _states_of(call.prefix_starts, end_states))
        outputs.append(output[:, :width].flatten(0, 1)[call.real_entries])
        indices.append(call.real_indices)
    row = torch.cat(outputs)[None]
    return row.new_zeros(hidden.shape).index_copy(1, torch.cat(indices), row)


def _states_of(prefix_starts: Sequence[int], end_states: dict[int, States]) -> States | None:
    """Stack the states after the given prefixes; zeros for rows without a prefix, None if all."""
    number_of = {start: number for number, start in enumerate(end_states)}
    if number_of.keys().isdisjoint(prefix_starts):
        return None
    rows = torch.tensor([number_of.get(start, -1) for start in prefix_starts])
    stacked = {}
    for name, state in next(iter(end_states.values())).items():
        # The zeros come last, where the index -1 selects them.
        choices = [states[name] for states in end_states.values()] + [torch.zeros_like(state)]
        table = torch.cat(choices)
        stacked[name] = table[rows.to(table.device, non_blocking=True)]
    return stacked
