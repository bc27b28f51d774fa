"""What a model sees of rows: padded ones, or groups packed after one copy of their prompt.

A packed forward may take several passes: one over the prefixes, which keeps their keys and values,
and some over tails that read them. All are parts of one graph. As layers are recomputed for one
pass at a time, the working memory is that of the longest, whatever the number of completions.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.masking import common_prefix_length, length_mask, pad_ragged
from ..torch_internals import tree_map
from ..types import Rows
from .packed_attention import KEYWORD
from .packed_places import Layers, Packing
from .patches import checkpointed_layers
from .unwrap import Capture, autocast_to, capture_hidden, causal_model, evaluating

# Tokens; below these, passes cost more time than they save memory.
SHORTEST_PASS = 2048
SHORTEST_TAIL_PASS = 1024
PREFILL_TOKENS = 4096  # of the prompts that are computed in one forward before decoding


@dataclass(frozen=True)
class Layout:
    """Inputs of a model, and where the log-probability of each completion token comes from.

    M is the number of distinct predictions; completions that begin alike share theirs. E is the
    number of completion tokens that something predicts: all but the first tokens of documents.
    """

    inputs: dict[str, Any]
    shape: tuple[int, int]  # (B, C)
    sources: Tensor  # (M,) places in the flattened hidden states that predict a token
    targets: Tensor  # (M,) the tokens
    slots: Tensor  # (E,) which of the M predictions a completion token is
    places: Tensor  # (E,) where it is in the flattened (B, C)
    ends: Tensor  # (e,) places of last tokens, of rows that have any and if they were asked for
    rows: Tensor  # (e,) which rows those are
    last: int = 1  # tokens at the end of plain rows of which some predict, and the very last
    # Adds what other ranks found, where they divide the tokens of rows.
    join: Callable[[Tensor], Tensor] = lambda found: found

    def scatter(self, values: Tensor) -> Tensor:
        """Bring predictions (M,) to completions (B, C); 0 where nothing is predicted."""
        # Padding is not read: the gradient of a place read so often would be a long serial sum.
        flat = values.new_zeros(self.shape[0] * self.shape[1])
        return self.join(flat.index_copy(0, self.places, values[self.slots]).view(self.shape))

    def by_row(self, values: Tensor) -> Tensor:
        """Bring what belongs to `ends` (e,) to the rows (B,); 0 for rows without any token."""
        return self.join(values.new_zeros(self.shape[0]).index_copy(0, self.rows, values))


def plain_layout(
    batch: Rows, pad_id: int, device: torch.device, multiple: int | None = None
) -> Layout:
    """Pad each prompt and its completion on the right, where no token of a causal model looks.

    Padding is masked, so its value does not matter; the width becomes a multiple of `multiple`.
    """
    pairs = zip(batch.prefixes, batch.completion_ids, strict=True)
    rows = [[*prefix.ids, *completion] for prefix, completion in pairs]
    # One column at least, so that rows of nothing make a valid input.
    ids = pad_ragged(rows, pad_id, width=max([1, *map(len, rows)]), multiple=multiple)
    count, width = ids.shape
    inputs = {"input_ids": ids, "position_ids": torch.arange(width).expand(count, width)}
    exists = length_mask(torch.tensor(list(map(len, rows))), width)
    if not exists.all():  # a mask without zeros says nothing of rows, but is taken at its word
        inputs["attention_mask"] = exists.long()
    first = [max(0, len(prefix) - 1) for prefix in batch.prefixes]
    places = [range(row * width + first[row], (row + 1) * width) for row in range(count)]
    return _layout(inputs, batch, places, device, with_ends=True)


def packed_layout(
    batch: Rows, device: torch.device, with_ends: bool = False, shares_more: bool = True
) -> Layout:
    """Lay all rows end to end, those of a prompt next to each other, and each prompt once.

    The beginning that all completions of a prompt share is computed once as well, unless
    `shares_more` is False. The last token of a completion predicts nothing, so it is left out, or
    else `with_ends` its place is known. Documents share nothing with each other.
    """
    groups = list(_groups(batch, with_ends, shares_more))
    lengths = [(len(prefix), [*map(len, tails)]) for _, prefix, tails in groups]
    packing = Packing.of(lengths, device, unread=[*map(itemgetter(0), groups)])
    places = list[list[int]]()
    for (*_, tails), group in zip(groups, packing.groups, strict=True):
        known = range(group.prefix.start + group.unread, group.prefix.stop)
        start = group.tails.start
        for tail in tails:
            places.append([*known, *range(start, start + len(tail))])
            start += len(tail)
    runs = [(prefix, 0) for _, prefix, _ in groups]
    runs += [(tail, len(prefix)) for _, prefix, tails in groups for tail in tails]
    ids, positions = list[int](), list[int]()
    for run, first in runs:
        ids += run
        positions += range(first, first + len(run))
    # One token at least, as above.
    row = torch.tensor([ids or [0]]), torch.tensor([positions or [0]])
    return _layout(packed_inputs(*row, packing), batch, places, device, with_ends)


def _groups(
    batch: Rows, with_ends: bool, shares_more: bool
) -> Iterator[tuple[int, list[int], list[list[int]]]]:
    """Tokens of each prompt but the last, prefix of its completions, and what they go on with."""
    pairs = zip(batch.prefixes, map(list, batch.completion_ids), strict=True)
    for prefix, rows in groupby(pairs, key=itemgetter(0)):
        prompt = list(prefix.ids)
        completions = [ids for _, ids in rows]
        starts = [ids[:-1] for ids in completions if ids] if prompt and shares_more else [[]]
        # Between the first and the last in order lie all others.
        first, last = min(starts, default=[]), max(starts, default=[])
        shared = common_prefix_length(first, last)
        stop = None if with_ends else -1
        tails = [ids[shared:stop] for ids in completions]
        yield max(0, len(prompt) - 1), prompt + first[:shared], tails


def _layout(
    inputs: dict[str, Any],
    batch: Rows,
    places: Sequence[Sequence[int]],
    device: torch.device,
    with_ends: bool,
) -> Layout:
    """Lay out predictions; `places` of a row's tokens begin with the first one that predicts."""
    sources, targets, cells, ends, rows = (list[int]() for _ in range(5))
    width = max(map(len, batch.completion_ids), default=0)
    for row, (prefix, ids) in enumerate(zip(batch.prefixes, batch.completion_ids, strict=True)):
        first = 0 if len(prefix) else 1  # nothing predicts the first token of a document
        count = max(0, len(ids) - first)
        sources += places[row][:count]
        targets += ids[first:]
        cells += range(row * width + first, row * width + first + count)
        if with_ends and len(prefix) + len(ids):
            rows.append(row)
            ends.append(places[row][count])
    # One prediction at least, so that rows of nothing make a valid input. Those of the same token
    # after the same place, of completions that begin alike, are one.
    size = max(targets, default=0) + 1
    pair = torch.tensor(sources or [0]) * size + torch.tensor(targets or [0])
    pair, predictions = pair.unique(return_inverse=True)
    columns = inputs["input_ids"].shape[1]
    found = {
        "inputs": inputs,
        "sources": pair // size,
        "targets": pair % size,
        "slots": predictions[: len(cells)],
        "places": torch.tensor(cells, dtype=torch.long),
        "ends": torch.tensor(ends, dtype=torch.long),
        "rows": torch.tensor(rows, dtype=torch.long),
    }
    # Made in main memory, and read on the device alone, so that copies need not be waited for.
    last = columns - int((found["sources"] % columns).min())
    return Layout(shape=(len(batch), width), last=last, **tree_map(partial(_to, device), found))


def _to(device: torch.device, value: Any) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def packed_inputs(ids: Tensor, positions: Tensor, layout: Any) -> dict[str, Any]:
    """Inputs of a model for tokens (R, S) whose attention follows a layout."""
    return {
        "input_ids": ids,
        "position_ids": positions,
        # A mask of four dimensions is handed on as it is; the attention reads the layout instead.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),
        KEYWORD: layout,
    }


def wants_passes(model: nn.Module, layout: Layout) -> bool:
    """Whether cutting saves memory: there are prefixes, tails, and layers that are not kept."""
    packing, tokens = layout.inputs.get(KEYWORD), layout.inputs["input_ids"].shape[1]
    if not isinstance(packing, Packing) or tokens <= SHORTEST_PASS:
        return False
    causal, prefixes = causal_model(model), packing.groups[-1].prefix.stop
    rest = min(tokens - prefixes, tokens // 2)
    saves = recomputes(causal) and rest * working_bytes(causal) >= gradient_bytes(causal)
    return 0 < prefixes < tokens and (saves or not torch.is_grad_enabled())


def gradient_bytes(causal: Any) -> int:
    """Bytes of gradients from earlier micro-batches: passes sum theirs apart, and hold as much."""
    # Those of the ends are added as they arise, and not apart.
    ends = (causal.get_input_embeddings(), causal.get_output_embeddings())
    apart = {id(getattr(end, "weight", None)) for end in ends}
    gradients = (p.grad for p in causal.parameters() if id(p) not in apart)
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
    options = dict(checkpointed_layers(causal))
    reentrant = any(options.get(layer, {}).get("use_reentrant") is not False for layer in layers)
    return bool(layers) and causal.training and not reentrant


def run_passes(model: nn.Module, layout: Layout, run: Callable[..., Any], kept: Layers) -> Capture:
    """Run a packed layout in passes, prefixes by `run`: hidden states (1, T, H) as of one forward.

    Keys and values must stay in `kept`, which is empty, until the backward pass is done.
    """
    packing: Packing = layout.inputs[KEYWORD]
    prefixes = [group.prefix for group in packing.groups]
    groups = tuple(replace(group, cuts=()) for group in packing.groups)
    alone = Packing(groups, packing.device, kept)
    with capture_hidden(model) as capture:
        run(**cut_inputs(layout, slice(0, prefixes[-1].stop), alone))
    return _run_tails(model, layout, prefixes, capture, kept)


def _run_tails(
    model: nn.Module, layout: Layout, prefixes: Sequence[slice], ahead: Capture, kept: Layers
) -> Capture:
    """Hidden states of all that a layout has, of which prefixes are known, and kept at places."""
    parts = [torch.as_tensor(ahead.hidden)]
    pairs = zip(prefixes, layout.inputs[KEYWORD].groups, strict=True)
    tails = [(prefix, *cut) for prefix, group in pairs for cut in group.cuts]
    lengths, rest = [stop - start for _, start, stop in tails], iter(tails)
    for count in tails_of_passes(lengths, parts[0].shape[1]):
        at, packing = Packing.of_tails(list(islice(rest, count)), kept, layout.sources.device)
        with autocast_to(layout.sources.device, ahead.autocast):
            decoder = causal_model(model).base_model
            parts.append(decoder(**cut_inputs(layout, at, packing), use_cache=False)[0])
    return Capture(torch.cat(parts, 1), ahead.autocast)


def run_behind(model: nn.Module, layout: Layout, ahead: Layout, capture: Capture) -> Capture:
    """Hidden states (1, T, H) of completions after the prompts, in order, that `ahead` kept."""
    groups, before = layout.inputs[KEYWORD].groups, ahead.inputs[KEYWORD]
    prompts = [
        slice(other.prefix.start, other.prefix.start + group.prefix.stop - group.prefix.start)
        for group, other in zip(groups, before.groups, strict=True)
    ]
    states = torch.as_tensor(capture.hidden).detach()
    known = Capture(torch.cat([states[:, prompt] for prompt in prompts], 1), capture.autocast)
    with evaluating(model):
        return _run_tails(model, layout, prompts, known, before.kept)


def cut_inputs(layout: Layout, at: slice, attention: Packing) -> dict[str, Any]:
    """Inputs of a model for some of the tokens of a packed layout."""
    ids: Tensor = layout.inputs["input_ids"]
    return packed_inputs(ids[:, at], layout.inputs["position_ids"][:, at], attention)


def tails_of_passes(lengths: Sequence[int], prefix: int) -> list[int]:
    """How many tails of these lengths each pass computes."""
    # Tails need more working memory a token than prefixes: those of unequal lengths are gathered.
    return runs_within(max(SHORTEST_TAIL_PASS, prefix // 2), lengths)


def runs_within(limit: int, lengths: Iterable[int]) -> list[int]:
    """How many things of these lengths go into each run of as many as fit, and at least one."""
    counts, total = list[int](), 0
    for length in lengths:
        if not counts or total + length > limit:
            counts.append(0)
            total = 0
        counts[-1] += 1
        total += length
    return counts
