"""Layers that carry a state along a row: computed once for a prompt, and forked for its tails.

Such layers of transformers take their state from a cache and hand the last one back to it. Here
they are called once for each prefix, and once for all tails of similar length, with caches that
write nothing in place; so gradients flow from every tail into the prefix.
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
from .packed_places import Packing, States
from .unwrap import causal_model, mentions

Run = Callable[..., tuple[Tensor, States]]


class Fork:
    """What layers take for a cache of states (n, ...) of n rows: it knows the last ones."""

    def __init__(self, states: States | None = None):
        self.states = dict(states or {})

    def is_recording_past(self, layer_idx: int) -> bool:
        """True keeps one token from being computed by kernels that work in place."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs (n, W, size) of a convolution."""
        return self.states.get(("inputs", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(("state", layer_idx, state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> Tensor:
        """Append inputs; returns all that a convolution looks at."""
        size = options.get("conv_kernel_size") or conv_states.shape[-1]
        known = self.get_conv_state(layer_idx, state_idx)
        every = conv_states if known is None else torch.cat([known, conv_states], -1)
        # Padding by less than nothing cuts, and copies, so the whole row is not kept alive.
        self.states["inputs", layer_idx, state_idx] = pad(every, (size - every.shape[-1], 0))
        return every

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **ignored: Any
    ) -> Tensor:
        self.states["state", layer_idx, state_idx] = recurrent_states
        return recurrent_states


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that ask a cache for a state."""
    names = ("update_conv_state", "update_recurrent_state")
    modules = causal_model(model).modules()
    return [module for module in modules if mentions(module.__class__, *names)]


# The layers that were given a layout, which are checked, too; None outside `all_forked`.
_forked: ContextVar[set[nn.Module] | None] = ContextVar("forked", default=None)


@contextmanager
def all_forked(model: nn.Module) -> Iterator[None]:
    """Let recurrent layers understand layouts, and check that all of them continue from states."""
    layers = recurrent_layers(model)
    for layer in layers:
        kind: Any = type(layer)
        if not hasattr(kind.forward, "trl_original"):
            kind.forward = _aware(kind.forward)
    forked = set[nn.Module]()
    token = _forked.set(forked)
    try:
        yield
    finally:
        _forked.reset(token)
    if len(forked) < len(layers):
        raise RuntimeError("its recurrent layers are not told where prompts end")


def _check_state(run: Run, layout: Packing, hidden: Tensor, found: Tensor) -> None:
    """Compare a tail with the result of computing it after its prefix, without a state."""
    for group in layout.groups:
        if layout.tails_alone or not group.cuts:
            continue
        places = [*range(group.prefix.start, group.prefix.stop), *range(*group.cuts[-1])]
        tail = slice(*group.cuts[-1])
        whole = run(hidden[:, places])[0][:, group.prefix.stop - group.prefix.start :]
        difference = (whole - found[:, tail]).float().norm() / whole.float().norm()
        if not difference <= torch.finfo(found.dtype).eps ** 0.5:
            raise RuntimeError("its recurrent layers do not continue from a given state")


def _aware(original: Any) -> Any:
    names = inspect.signature(original).parameters
    cache = next((n for n in ("cache_params", "past_key_values") if n in names), "cache")

    @functools.wraps(original)
    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layout = kwargs.pop(KEYWORD, None)
        if layout is None or isinstance(layout, Decoding):
            return original(self, hidden_states, *args, **kwargs)
        if not isinstance(layout, Packing):
            raise NotImplementedError("Recurrent layers do not support this layout.")

        def run(tokens: Tensor, states: States | None = None) -> tuple[Tensor, States]:
            fork = Fork(states)
            found = original(self, tokens, **kwargs | {"attention_mask": None, cache: fork})
            return found, fork.states

        found = _run_packed(run, layout, hidden_states, getattr(self, "layer_idx", id(self)))
        forked = _forked.get()
        if forked is not None:
            forked.add(self)
            _check_state(run, layout, hidden_states, found)
        return found

    forward.trl_original = original  # type: ignore[attr-defined]
    return forward


def _run_packed(run: Run, layout: Packing, hidden: Tensor, layer: int) -> Tensor:
    """Outputs (1, T, H) of a layer: prefixes one by one, then tails from the states after them."""
    parts, places = list[Tensor](), list[Tensor]()
    ends: dict[int, States] = {}  # behind prefixes, by where these begin
    # Prefixes stand behind tails that are computed alone.
    shift = hidden.shape[1] if layout.tails_alone else 0
    kept = {} if layout.kept is None else layout.kept.states
    for group in layout.with_prefix:
        start, name = group.prefix.start, (layer, group.prefix.start - shift)
        if layout.tails_alone:
            ends[start] = kept[name]
        else:
            found, ends[start] = run(hidden[:, group.prefix])
            kept.setdefault(name, ends[start])  # not again when this is recomputed
            parts.append(found[0])
            places.append(torch.arange(start, group.prefix.stop, device=hidden.device))
    for part in layout.parts():
        if part.places is None:
            continue
        tokens, width = hidden[0][part.queries], part.queries.shape[1]
        if width == 1:  # one token alone is computed in another way, in place
            tokens = tokens.expand(-1, 2, -1)
        found, _ = run(tokens, _selected(ends, part.prefixes))
        parts.append(found[:, :width].flatten(0, 1)[part.cells])
        places.append(part.places)
    outputs = torch.cat(parts)[None]
    return outputs.new_zeros(hidden.shape).index_copy(1, torch.cat(places), outputs)


def _selected(ends: dict[int, States], owners: Sequence[int]) -> States | None:
    """The states after the prefixes of some rows; rows without a prefix begin with zeros."""
    known = {start: number for number, start in enumerate(ends)}
    if known.keys().isdisjoint(owners):
        return None
    rows, found = torch.tensor([known.get(start, -1) for start in owners]), {}
    for name, state in next(iter(ends.values())).items():
        every = torch.cat([*(states[name] for states in ends.values()), torch.zeros_like(state)])
        found[name] = every[rows.to(every.device, non_blocking=True)]
    return found
