"""What a model sees of rows: padded ones, or groups packed behind one copy of their prompt.

A packed forward may take several passes: one over the prefixes, which keeps their keys and values,
and some over tails that read them. All are parts of one graph. As layers are recomputed for one
pass at a time, the working memory is that of the longest, whatever the number of completions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..ops.masking import common_prefix_length, length_mask, pad_ragged
from ..types import Rows
from .packed_attention import KEYWORD
from .packed_places import Group, Layers, Packing, Tail
from .unwrap import Capture, autocast_to, capture_hidden, causal_model, evaluating

# Tokens; below these, passes cost more time than they save memory.
SHORTEST_PASS = 2048
SHORTEST_TAIL_PASS = 1536


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

    def scatter(self, values: Tensor) -> Tensor:
        """Bring predictions (M,) to completions (B, C); 0 where nothing is predicted."""
        # Padding is not read: the gradient of a place read so often would be a long serial sum.
        flat = values.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_copy(0, self.places, values[self.slots]).view(self.shape)

    def by_row(self, values: Tensor) -> Tensor:
        """Bring what belongs to `ends` (e,) to the rows (B,); 0 for rows without any token."""
        return values.new_zeros(self.shape[0]).index_copy(0, self.rows, values)


def plain_layout(
    batch: Rows, pad_id: int, device: torch.device, multiple: int | None = None
) -> Layout:
    """Pad each prompt with its completion on the right, where no causal model looks back from.

    Padding is masked, so its value does not matter; the width becomes a multiple of `multiple`.
    """
    pairs = list(zip(batch.prompt_ids, batch.completion_ids, strict=True))
    rows = [[*prompt, *completion] for prompt, completion in pairs]
    # One column at least, so that rows of nothing make a valid input.
    ids = pad_ragged(rows, pad_id, width=max([1, *map(len, rows)]), multiple=multiple)
    count, width = ids.shape
    before, lengths = (torch.tensor([len(pair[part]) for pair in pairs]) for part in (0, 1))
    exists = length_mask(before + lengths, width)
    predicted = _predicted(batch, _width(batch))
    # Column j of the completions lies behind the prompt of its row.
    row, column = predicted.nonzero(as_tuple=True)
    places = row * width + before[row] + column
    first = int((places % width).min()) if len(places) else 1
    has_tokens = before + lengths > 0
    inputs = {"input_ids": ids, "position_ids": torch.arange(width).expand(count, width)}
    if not exists.all():  # a mask without zeros says nothing of rows, but is taken at its word
        inputs["attention_mask"] = exists.long()
    return _on_device(
        Layout(
            inputs=inputs,
            shape=(count, _width(batch)),
            # One prediction at least, as above.
            sources=places - 1 if len(places) else torch.zeros(1, dtype=torch.long),
            targets=ids.flatten()[places if len(places) else [0]],
            slots=torch.arange(len(places)),
            places=_marked(predicted),
            ends=(torch.arange(count) * width + before + lengths - 1)[has_tokens],
            rows=_marked(has_tokens),
            last=width - first + 1,
        ),
        device,
    )


def packed_layout(
    batch: Rows, device: torch.device, with_ends: bool = False, shares_more: bool = True
) -> Layout:
    """Put all rows, those of a prompt next to each other, behind each other, each prompt once.

    The beginning that all completions of a prompt share is computed once as well, unless
    `shares_more` is False. The last token of a completion predicts nothing, so it is left out, or
    else `with_ends` its place is known. Documents share nothing with each other.
    """
    # Neighboring rows with the same prompt.
    runs = groupby(range(len(batch)), key=lambda row: list(batch.prompt_ids[row]))
    groups = [_GroupRows.of(batch, list(rows), with_ends, shares_more) for _, rows in runs]
    lengths = [(len(group.prefix), list(map(len, group.tails))) for group in groups]
    packing = Packing.of(lengths, device)
    ids, positions = _tokens(groups)
    sources, targets, slots, last = _predictions(groups, packing)
    ends = torch.tensor(last if with_ends else [], dtype=torch.long)
    width = _width(batch)
    layout = Layout(
        inputs=packed_inputs(torch.tensor([ids]), torch.tensor([positions]), packing),
        shape=(len(batch), width),
        # One prediction at least, so that rows of nothing make a valid input.
        sources=torch.tensor(sources or [0]),
        targets=torch.tensor(targets or [0]),
        slots=torch.tensor(slots, dtype=torch.long),
        places=_marked(_predicted(batch, width)),
        ends=ends[ends >= 0],
        rows=_marked(ends >= 0),
    )
    return _on_device(layout, device)


def packed_inputs(ids: Tensor, positions: Tensor, layout: Any) -> dict[str, Any]:
    """Inputs of a model for tokens (R, S) whose attention follows a layout."""
    return {
        "input_ids": ids,
        "position_ids": positions,
        # A mask of four dimensions is handed on as it is; the attention reads the layout instead.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),
        KEYWORD: layout,
    }


@dataclass(frozen=True)
class _GroupRows:
    """What completions of one prompt share, and what each goes on with."""

    prompt: list[int]
    shared: list[int]
    completions: list[list[int]]
    tails: list[list[int]]

    @classmethod
    def of(cls, batch: Rows, rows: Sequence[int], with_ends: bool, shares_more: bool) -> _GroupRows:
        prompt = list(batch.prompt_ids[rows[0]])
        completions = [list(batch.completion_ids[row]) for row in rows]
        can_share = bool(prompt) and shares_more
        starts = [ids[:-1] for ids in completions if ids] if can_share else [[]]
        # Between the first and the last in order lie all others.
        first, last = min(starts, default=[]), max(starts, default=[])
        shared = first[: common_prefix_length(first, last)]
        tails = [ids[len(shared) :] for ids in completions]
        if not with_ends:
            tails = [tail[:-1] for tail in tails]
        return cls(prompt, shared, completions, tails)

    @property
    def prefix(self) -> list[int]:
        return self.prompt + self.shared


def _tokens(groups: Sequence[_GroupRows]) -> tuple[list[int], list[int]]:
    """Ids and positions of all prefixes, then of all tails; one token if there is none."""
    runs = [(group.prefix, 0) for group in groups]
    runs += [(tail, len(group.prefix)) for group in groups for tail in group.tails]
    ids = chain.from_iterable(run for run, _ in runs)
    positions = chain.from_iterable(range(first, first + len(run)) for run, first in runs)
    return list(ids) or [0], list(positions) or [0]


def _predictions(
    groups: Sequence[_GroupRows], packing: Packing
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Sources, targets, slots, and the place of the last token of each row; -1 without any."""
    sources, targets, slots, ends = list[int](), list[int](), list[int](), list[int]()
    for group, places in zip(groups, packing.groups, strict=True):
        last, count = places.prefix.stop - 1, len(group.shared)
        common = range(len(sources), len(sources) + count)
        sources += range(last - count, last)
        targets += group.shared
        start = places.tails.start
        first = 0 if group.prompt else 1  # nothing predicts the first token of a document
        for ids, tail in zip(group.completions, group.tails, strict=True):
            own = ids[count:][first:]
            slots += [*common[: len(ids)], *range(len(sources), len(sources) + len(own))]
            sources += [last, *range(start, start + len(tail))][first:][: len(own)]
            targets += own
            start += len(tail)
            end = start if ids else places.prefix.start + len(group.prompt)
            ends.append(end - 1 if ids or group.prompt else -1)
    return sources, targets, slots, ends


def _width(batch: Rows) -> int:
    """Columns C: tokens of the longest completion."""
    return max(map(len, batch.completion_ids), default=0)


def _predicted(batch: Rows, width: int) -> Tensor:
    """Mark the completion tokens (B, C) that have something before them."""
    found = length_mask(torch.tensor(list(map(len, batch.completion_ids))), width)
    found[:, :1] &= torch.tensor([len(prompt) > 0 for prompt in batch.prompt_ids])[:, None]
    return found


def _marked(mask: Tensor) -> Tensor:
    """Places of the marked entries in a flattened mask."""
    return mask.flatten().nonzero()[:, 0]


def _on_device(layout: Layout, device: torch.device) -> Layout:
    """Copy what was made in main memory, and is read on the device alone, without waiting."""
    move = tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True), vars(layout))
    return Layout(**move)


# --- Passes ---


def wants_passes(model: nn.Module, layout: Layout) -> bool:
    """Whether cutting a packed forward saves memory.

    There must be prefixes and tails, and layers that are not kept.
    """
    packing: Packing | None = layout.inputs.get(KEYWORD)
    tokens = layout.inputs["input_ids"].shape[1]
    if packing is None or not packing.buckets or tokens <= SHORTEST_PASS:
        return False
    causal, prefixes = causal_model(model), packing.groups[-1].prefix.stop
    rest = min(tokens - prefixes, tokens // 2)
    saves = recomputes(causal) and rest * working_bytes(causal) >= gradient_bytes(causal)
    return prefixes > 0 and (saves or not torch.is_grad_enabled())


def gradient_bytes(causal: Any) -> int:
    """Bytes of gradients that are there from earlier micro-batches.

    A weight's gradients from several passes are added up before they are added to these, so
    passes hold as much again.
    """
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
    functions = [getattr(layer, "_gradient_checkpointing_func", None) for layer in layers]
    options = [getattr(function, "keywords", {}) for function in functions]
    reentrant = any(option.get("use_reentrant") is not False for option in options)
    return bool(layers) and causal.training and not reentrant


def run_passes(model: nn.Module, layout: Layout, run: Callable[..., Any], kept: Layers) -> Capture:
    """Run a packed layout in passes: hidden states (1, T, H) as of one forward.

    The prefixes are run by `run`, the tails by the decoder. Keys and values of the prefixes must
    stay in `kept`, which is empty, until the backward pass is done.
    """
    packing: Packing = layout.inputs[KEYWORD]
    prefix = slice(0, packing.groups[-1].prefix.stop)
    none = slice(prefix.stop, prefix.stop)
    alone = Packing(tuple(Group(group.prefix, none) for group in packing.groups), (), kept)
    with capture_hidden(model) as capture:
        run(**cut_inputs(layout, prefix, alone))
    parts = [torch.as_tensor(capture.hidden)]
    tails = [(group.prefix, *cut) for group in packing.groups for cut in group.cuts]
    lengths, rest = [stop - start for _, start, stop in tails], iter(tails)
    for count in tails_of_passes(lengths, prefix.stop):
        some = list(islice(rest, count))
        parts.append(_run_tails(model, layout, some, kept, capture.autocast))
    return Capture(torch.cat(parts, 1), capture.autocast)


def _run_tails(
    model: nn.Module,
    layout: Layout,
    tails: Sequence[Tail],
    kept: Layers,
    autocast: torch.dtype | None,
) -> Tensor:
    """Hidden states (1, t, H) of neighboring tails behind kept prefixes."""
    at, packing = Packing.of_tails(tails, kept, layout.sources.device)
    with autocast_to(layout.sources.device, autocast):
        decoder = causal_model(model).base_model
        return decoder(**cut_inputs(layout, at, packing), use_cache=False)[0]


def run_behind(
    model: nn.Module, layout: Layout, ahead: Layout, states: Tensor, autocast: torch.dtype | None
) -> Tensor:
    """Hidden states (T, H) of completions of which a layout shares the prompts, and no more.

    Those of `ahead`, which are `states`, have the same prompts in the same order, and keep keys
    and values.
    """
    groups, before = layout.inputs[KEYWORD].groups, ahead.inputs[KEYWORD]
    prompts = [
        slice(other.prefix.start, other.prefix.start + group.prefix.stop - group.prefix.start)
        for group, other in zip(groups, before.groups, strict=True)
    ]
    parts = [states[prompt].detach() for prompt in prompts]
    pairs = zip(prompts, groups, strict=True)
    tails = [(prompt, *cut) for prompt, group in pairs for cut in group.cuts]
    if tails:
        with evaluating(model):
            parts.append(_run_tails(model, layout, tails, before.kept, autocast)[0])
    return torch.cat(parts)


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
