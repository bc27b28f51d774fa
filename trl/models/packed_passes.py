"""A packed forward in several passes, so that the layers never work on all tokens at once.

The first pass is over the prefixes and keeps their keys and values; the others are over tails that
read them. All are parts of one graph. With gradient checkpointing the layers of one pass at a time
are recomputed in the backward pass, and without gradient nothing but hidden states is kept: the
working memory is that of the longest pass, whatever the number of completions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from .packed_attention import KEYWORD, Group, Layers, Packing, make_buckets
from .packed_layout import Layout, packed_inputs
from .unwrap import Capture, autocast_to, capture_hidden, causal_model

# Tokens; below these, passes cost more time than they save memory.
SHORTEST_PASS = 2048
SHORTEST_TAIL_PASS = 1536


def wants_passes(model: nn.Module, layout: Layout) -> bool:
    """Whether cutting a packed forward saves memory.

    There must be prefixes and tails, and layers that are not kept.
    """
    packing: Packing = layout.inputs[KEYWORD]
    tokens = layout.inputs["input_ids"].shape[1]
    if tokens <= SHORTEST_PASS or not packing.buckets or not packing.groups[-1].prefix.stop:
        return False
    if not torch.is_grad_enabled():
        return True
    causal = causal_model(model)
    rest = min(tokens - packing.groups[-1].prefix.stop, tokens // 2)
    return recomputes(causal) and rest * working_bytes(causal) >= gradient_bytes(causal)


def gradient_bytes(causal: Any) -> int:
    """Bytes of gradients that are there from earlier micro-batches.

    A weight's gradients from several passes are added up before they are added to these, so
    passes hold as much again.
    """
    gradients = (parameter.grad for parameter in causal.parameters())
    return sum(gradient.nbytes for gradient in gradients if gradient is not None)


def working_bytes(causal: Any) -> int:
    """Bytes that a layer needs for a token, roughly: of its norms, attention and gated MLP."""
    config = causal.config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return 4 * (6 * config.hidden_size + 6 * width + 3 * inner)


def recomputes(causal: Any) -> bool:
    """Whether layers are recomputed, in the way that lets gradients reach captured tensors."""
    layers = [m for m in causal.modules() if getattr(m, "gradient_checkpointing", False)]
    functions = [getattr(layer, "_gradient_checkpointing_func", None) for layer in layers]
    options = [getattr(function, "keywords", {}) for function in functions]
    reentrant = any(option.get("use_reentrant") is not False for option in options)
    return bool(layers) and causal.training and not reentrant


def run_passes(model: nn.Module, layout: Layout, run: Callable[..., Any], kept: Layers) -> Capture:
    """Run a packed layout in passes: hidden states (1, T, H) as of one forward.

    Args:
        model: a causal language model, wrapped or not.
        layout (`Layout`): from `packed_layout`.
        run: calls the model, for the prefixes; the tails go to its decoder.
        kept (`Layers`): empty; takes the keys and values of the prefixes, which must stay there
            until the backward pass is done.
    """
    packing: Packing = layout.inputs[KEYWORD]
    prefix = slice(0, packing.groups[-1].prefix.stop)
    none = slice(prefix.stop, prefix.stop)
    alone = Packing(tuple(Group(group.prefix, none) for group in packing.groups), (), kept)
    with capture_hidden(model) as capture:
        run(**_cut(layout, prefix, alone))
    parts = [torch.as_tensor(capture.hidden)]
    decoder = causal_model(model).base_model
    device = layout.sources.device
    with autocast_to(device, capture.autocast):
        for at, tails in _tail_passes(packing, kept, device):
            parts.append(decoder(**_cut(layout, at, tails), use_cache=False)[0])
    return Capture(torch.cat(parts, 1), capture.autocast)


def _cut(layout: Layout, at: slice, attention: Packing) -> dict[str, Any]:
    ids: Tensor = layout.inputs["input_ids"]
    return packed_inputs(ids[:, at], layout.inputs["position_ids"][:, at], attention)


def tails_of_passes(lengths: Sequence[int], prefix: int) -> list[int]:
    """How many tails each pass computes: as many as fit, and at least one.

    Args:
        lengths: tokens of each tail.
        prefix (`int`): tokens of the pass over the prefixes.
    """
    # Tails need more working memory a token than prefixes: those of unequal lengths are gathered.
    limit = max(SHORTEST_TAIL_PASS, prefix // 2)
    counts, tokens = [0], 0
    for length in lengths:
        if counts[-1] and tokens + length > limit:
            counts.append(0)
            tokens = 0
        counts[-1] += 1
        tokens += length
    return counts if lengths else []


def _tail_passes(
    packing: Packing, kept: Layers, device: torch.device
) -> Iterator[tuple[slice, Packing]]:
    """Cut the tails into runs; those of all groups follow each other without a gap."""
    tails = [(group.prefix, start, stop) for group in packing.groups for start, stop in group.cuts]
    lengths = [stop - start for _, start, stop in tails]
    for count in tails_of_passes(lengths, packing.groups[-1].prefix.stop):
        run, tails = tails[:count], tails[count:]
        first, last = run[0][1], run[-1][2]
        groups: list[Group] = []
        for prefix, parts in groupby(run, key=lambda tail: tail[0]):
            cuts = tuple((start - first, stop - first) for _, start, stop in parts)
            groups.append(Group(prefix, slice(cuts[0][0], cuts[-1][1]), cuts))
        buckets = make_buckets((cut for group in groups for cut in group.cuts), device)
        yield slice(first, last), Packing(tuple(groups), buckets, kept, tails_alone=True)
