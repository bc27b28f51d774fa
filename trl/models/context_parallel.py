"""Context parallelism: the tokens of one packed row are divided among ranks.

Each rank computes its own tokens: embeddings, norms, MLPs and predictions. In every layer it
gathers the keys and values of all tokens and attends to those that its queries may see; gradients
are reduced to the ranks that own the tokens. So activations are divided by the number of ranks,
except for the keys and values of one layer at a time, and results equal those of one rank.

Late tokens of a document attend to more keys than early ones. To balance the work, the row is
divided into twice as many runs as there are ranks, and rank r of n computes runs r and 2n - 1 - r
(arXiv 2407.21783, section 3.3.2).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import FunctionCtx
from torch.nn.functional import pad

from .layout_check import windows
from .packed_attention import KEYWORD, AttentionOptions, attend
from .packed_layout import Layout, packed_inputs
from .packed_row import AttentionCall, AttentionCalls, KeysValues, Packing
from .recurrent import recurrent_layers


class _Gather(torch.autograd.Function):
    """All-gather (1, ...) of all ranks to (n, ...); the backward pass is a reduce-scatter."""

    @staticmethod
    def forward(ctx: FunctionCtx, group: dist.ProcessGroup, own: Tensor) -> Tensor:
        ctx.group = group
        stacked = own.new_empty(dist.get_world_size(group), *own.shape[1:])
        dist.all_gather(list(stacked.split(1)), own.contiguous(), group)
        return stacked

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[None, Tensor]:
        own = torch.empty_like(grad[:1])
        dist.reduce_scatter(own, list(grad.contiguous().split(1)), group=ctx.group)
        return None, own


@dataclass(frozen=True)
class SlicedPacking:
    """What the queries of one rank see of a packed row."""

    calls: AttentionCalls
    context: "ContextParallel"
    longest: int  # tokens of the longest document

    def attend(self, query: Tensor, keys_values: KeysValues, options: AttentionOptions) -> Tensor:
        """Attend from this rank's tokens (1, N, t, D), with keys and values of the same tokens."""
        if options.window is not None and options.window.size < self.longest:
            raise NotImplementedError("Context parallelism does not support attention windows.")
        key, value = keys_values
        gathered = self.context.gather(key), self.context.gather(value)
        return attend(self.calls, query, gathered, options)


class ContextParallel:
    """A process group whose ranks divide the tokens of the same rows among them."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.count = dist.get_world_size(group)

    def gather(self, states: Tensor) -> Tensor:
        """Gather the tokens (1, K, t, D) of all ranks, in the order of the row."""
        early, late = _Gather.apply(self.group, states).chunk(2, dim=2)
        return torch.cat([*early, *late.flip(0)], dim=1)[None]

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over ranks, of which at most one has a value other than 0 in each entry."""
        numbers = values.float() if values.dtype == torch.bool else values
        return _Gather.apply(self.group, numbers[None]).sum(0).to(values.dtype)

    def slice(self, layout: Layout) -> Layout:
        """Reduce a packed layout to the tokens and predictions of this rank."""
        ids = layout.inputs["input_ids"]
        positions = layout.inputs["position_ids"]
        width = ids.shape[1]
        length = -(-width // (2 * self.count))
        starts = [self.rank * length, (2 * self.count - 1 - self.rank) * length]
        tokens = torch.cat([torch.arange(start, start + length) for start in starts]).to(ids.device)
        padding = 2 * self.count * length - width
        calls = tuple(_attention_calls(layout.inputs[KEYWORD], starts, length))
        inputs = packed_inputs(
            pad(ids, (0, padding))[:, tokens],
            pad(positions, (0, padding))[:, tokens],
            SlicedPacking(calls, self, layout.inputs[KEYWORD].longest),
        )
        own_index = torch.full((width + padding,), -1, device=ids.device)  # -1: of another rank
        own_index[tokens] = torch.arange(2 * length, device=ids.device)
        sources = own_index[layout.sources]
        ends = own_index[layout.ends]
        is_own_prediction = sources >= 0
        is_own_end = ends >= 0
        is_own_cell = is_own_prediction[layout.predictions]
        new_prediction = is_own_prediction.cumsum(0) - 1
        return replace(
            layout,
            inputs=inputs,
            # One more than needed, so that a rank without predictions still reads some token.
            sources=pad(sources[is_own_prediction], (0, 1)),
            targets=pad(layout.targets[is_own_prediction], (0, 1)),
            predictions=new_prediction[layout.predictions[is_own_cell]],
            cells=layout.cells[is_own_cell],
            ends=ends[is_own_end],
            rows=layout.rows[is_own_end],
            sum_over_ranks=self.sum,
        )


def check_divisible(model: nn.Module, count: int, longest: int | None) -> None:
    """Raise a ValueError if `count` ranks cannot divide rows of this model of `longest` tokens."""
    obstacles = [
        f"an attention window of {size} tokens, and max_length={longest} allows longer rows"
        for size in windows(model)
        if longest is None or longest > size
    ]
    if recurrent_layers(model):
        obstacles.append("recurrent layers")
    if obstacles:
        raise ValueError(
            f"cp_size={count} cannot divide the rows of this model, which has {obstacles[0]}. "
            "Set cp_size=1, or choose another model."
        )


def _attention_calls(packing: Packing, starts: list[int], length: int) -> Iterator[AttentionCall]:
    """Calls of the runs that begin at `starts`: queries see their own run first, causally."""
    documents = [(group.prefix, slice(0, 0)) for group in packing.groups]
    documents += [(slice(*tail), group.prefix) for group in packing.groups for tail in group.tails]
    for number, start in enumerate(starts):
        shift = number * length - start
        for document, prefix in documents:
            first = max(document.start, start)
            last = min(document.stop, start + length)
            if first >= last:
                continue
            queries = slice(first + shift, last + shift)
            yield AttentionCall(queries, slice(first, last), causal=True)
            for keys in (prefix, slice(document.start, first)):
                if keys.start < keys.stop:
                    yield AttentionCall(queries, keys, accumulates=True)
