"""Context parallelism: the tokens of one packed row are divided among ranks.

Each rank computes its own tokens: embeddings, norms, MLPs and predictions. In every layer it
gathers the keys and values of all tokens, and attends to those that its queries may see; gradients
go back to the ranks they came from. So activations are divided by the number of ranks, but for the
keys and values of one layer at a time, and results are those of one rank.

Late tokens of a document attend to more than early ones. The row is therefore cut into twice as
many runs as there are ranks, and rank r of n takes runs r and 2n - 1 - r (arXiv 2407.21783, 3.3.2).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import pad

from .layout_check import windows
from .packed_attention import KEYWORD, Rules, attend_to
from .packed_layout import Layout, packed_inputs
from .packed_places import Packing, Part, Parts
from .recurrent import recurrent_layers


class _Gather(torch.autograd.Function):
    """Stack (1, ...) of all ranks: (n, ...); each gets back the gradients of all for its part."""

    @staticmethod
    def forward(ctx: Any, group: Any, mine: Tensor) -> Tensor:
        ctx.group = group
        stacked = mine.new_empty(dist.get_world_size(group), *mine.shape[1:])
        dist.all_gather(list(stacked.split(1)), mine.contiguous(), group)
        return stacked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        mine = torch.empty_like(grad[:1])
        dist.reduce_scatter(mine, list(grad.contiguous().split(1)), group=ctx.group)
        return None, mine


@dataclass(frozen=True)
class SlicedPacking:
    """What the queries of one rank see of a packed row."""

    parts: Parts
    context: "ContextParallel"
    longest: int  # tokens of the longest document

    def attend(self, query: Tensor, own: tuple[Tensor, Tensor], rules: Rules) -> Tensor:
        """Attend from this rank's tokens (1, N, t, D), with keys and values of the same tokens."""
        if rules.window is not None and rules.window.size < self.longest:
            raise NotImplementedError("Context parallelism does not support attention windows.")
        keys, values = map(self.context.gather, own)
        return attend_to(self.parts, query, (keys, values), rules)


class ContextParallel:
    """The ranks of a process group, which divide the tokens of the same rows among them."""

    def __init__(self, group: Any):
        self.group = group
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, states: Tensor) -> Tensor:
        """Put together the runs (1, K, t, D) of all ranks in the order of the row."""
        early, late = _Gather.apply(self.group, states).chunk(2, dim=2)
        return torch.cat([*early, *late.flip(0)], dim=1)[None]

    def sum(self, mine: Tensor) -> Tensor:
        """Add up what each rank has; each entry is that of one rank, and 0 elsewhere."""
        numbers = mine.float() if mine.dtype == torch.bool else mine
        return _Gather.apply(self.group, numbers[None]).sum(0).to(mine.dtype)

    def slice(self, layout: Layout) -> Layout:
        """Cut a packed layout to what this rank computes; all ranks know what is predicted."""
        ids, positions = layout.inputs["input_ids"], layout.inputs["position_ids"]
        width = ids.shape[1]
        length = -(-width // (2 * self.count))
        starts = [self.rank * length, (2 * self.count - 1 - self.rank) * length]
        tokens = torch.cat([torch.arange(start, start + length) for start in starts]).to(ids.device)
        more = 2 * self.count * length - width
        parts = tuple(_parts(layout.inputs[KEYWORD], starts, length))
        inputs = packed_inputs(
            pad(ids, (0, more))[:, tokens],
            pad(positions, (0, more))[:, tokens],
            SlicedPacking(parts, self, layout.inputs[KEYWORD].longest),
        )
        here = torch.full((width + more,), -1, device=ids.device)
        here[tokens] = torch.arange(2 * length, device=ids.device)
        sources, ends = here[layout.sources], here[layout.ends]
        predicted, ended = sources >= 0, ends >= 0
        cells = predicted[layout.slots]
        return replace(
            layout,
            inputs=inputs,
            # The last stands for nothing: where this rank predicts nothing, some token is read.
            sources=pad(sources[predicted], (0, 1)),
            targets=pad(layout.targets[predicted], (0, 1)),
            slots=(predicted.cumsum(0) - 1)[layout.slots[cells]],
            places=layout.places[cells],
            ends=ends[ended],
            rows=layout.rows[ended],
            join=self.sum,
        )


def check_divisible(model: nn.Module, count: int, longest: int | None) -> None:
    """Raise if layers cannot compute rows of at most `longest` tokens that ranks divide."""
    found = [
        f"an attention window of {size} tokens, and max_length={longest} allows longer rows"
        for size in windows(model)
        if longest is None or longest > size
    ]
    if recurrent_layers(model):
        found.append("recurrent layers")
    if found:
        words = f"has {found[0]}. Set cp_size=1, or choose another model."
        raise ValueError(f"cp_size={count} cannot divide the rows of this model, which {words}")


def _parts(packing: Packing, starts: list[int], length: int) -> Iterator[Part]:
    """What queries of the runs that begin at `starts` see: themselves first, causally."""
    documents = [(group.prefix, slice(0, 0)) for group in packing.groups]
    documents += [(slice(*cut), group.prefix) for group in packing.groups for cut in group.cuts]
    for number, start in enumerate(starts):
        shift = number * length - start
        for own, prefix in documents:
            first, last = max(own.start, start), min(own.stop, start + length)
            if first >= last:
                continue
            queries = slice(first + shift, last + shift)
            yield Part(queries, slice(first, last), causal=True)
            for keys in (prefix, slice(own.start, first)):
                if keys.start < keys.stop:
                    yield Part(queries, keys, again=True)
