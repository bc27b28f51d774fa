"""The inputs of a model: padded rows, or rows packed behind one copy of each prompt.

A packed forward may take several passes: one over the prefixes, which caches their keys and values,
and some over tails, which read them. All passes belong to one autograd graph. With activation
checkpointing, layers are recomputed for one pass at a time, so the working memory is that of the
longest pass, whatever the number of completions.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..ops.masking import common_prefix_length, length_mask, pad_ragged
from ..ops.torch_internals import tree_map
from ..types import Rows
from .packed_attention import KEYWORD, AttentionLayout
from .packed_row import Packing, PrefixCache, Tail
from .patches import checkpointed_layers
from .unwrap import Capture, autocast_to, capture_hidden, causal_model, evaluating

T = TypeVar("T")

# Tokens. Shorter passes would cost more time than the memory they save is worth.
SHORTEST_PASS = 2048
SHORTEST_TAIL_PASS = 1024
PREFILL_TOKENS = 4096  # prompt tokens in one forward before decoding


@dataclass(frozen=True)
class Layout:
    """Inputs of a model, and which hidden state predicts each completion token.

    M is the number of distinct predictions; completions with a common prefix share those of the
    prefix. E is the number of completion tokens that are predicted: all but the first tokens of
    documents.
    """

    inputs: dict[str, Any]
    shape: tuple[int, int]  # (B, C)
    sources: Tensor  # (M,) indices of the flattened hidden states that predict a token
    targets: Tensor  # (M,) the predicted tokens
    predictions: Tensor  # (E,) which of the M predictions belongs to a completion token
    cells: Tensor  # (E,) index of that completion token in the flattened (B, C)
    # (e,) indices of the hidden states of last tokens, of rows that have tokens; if requested.
    ends: Tensor
    rows: Tensor  # (e,) the rows of these
    # For plain rows: all sources, and the last token, are among this many last tokens of a row.
    logits_to_keep: int = 1
    # Sums over the ranks that divide the tokens of a row among them.
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda values: values

    def scatter(self, values: Tensor) -> Tensor:
        """Scatter predictions (M,) to completion tokens (B, C); 0 where nothing is predicted."""
        # Padding gathers no value: the gradient of one read so often would be a long serial sum.
        flat = values.new_zeros(self.shape[0] * self.shape[1])
        flat = flat.index_copy(0, self.cells, values[self.predictions])
        return self.sum_over_ranks(flat.view(self.shape))

    def by_row(self, values: Tensor) -> Tensor:
        """Scatter values (e,) of last tokens to the rows (B,); 0 for rows without tokens."""
        flat = values.new_zeros(self.shape[0]).index_copy(0, self.rows, values)
        return self.sum_over_ranks(flat)


def plain_layout(
    batch: Rows, pad_id: int, device: torch.device, multiple: int | None = None
) -> Layout:
    """Pad each prompt with its completion on the right, where causal attention does not look.

    Padding is masked, so its value does not matter; the width becomes a multiple of `multiple`.
    """
    pairs = zip(batch.prefixes, batch.completion_ids, strict=True)
    rows = [[*prefix.ids, *completion] for prefix, completion in pairs]
    # At least one column, so that empty rows make a valid input.
    ids = pad_ragged(rows, pad_id, width=max([1, *map(len, rows)]), multiple=multiple)
    count, width = ids.shape
    inputs = {"input_ids": ids, "position_ids": torch.arange(width).expand(count, width)}
    exists = length_mask(torch.tensor(list(map(len, rows))), width)
    if not exists.all():  # an all-ones mask is redundant, but would still disable fast paths
        inputs["attention_mask"] = exists.long()
    first = [max(0, len(prefix) - 1) for prefix in batch.prefixes]
    indices = [range(row * width + first[row], (row + 1) * width) for row in range(count)]
    return _layout(inputs, batch, indices, device, with_ends=True)


def packed_layout(
    batch: Rows, device: torch.device, with_ends: bool = False, shares_more: bool = True
) -> Layout:
    """Lay all rows end to end, each prompt once and the completions of a prompt in sequence.

    The common prefix of all completions of a prompt is computed once as well, unless `shares_more`
    is False. The last token of a completion predicts nothing, so it is left out unless `with_ends`
    is set. Documents share nothing with each other.
    """
    groups = list(_groups(batch, with_ends, shares_more))
    lengths = [(len(group.prefix), [*map(len, group.tails)]) for group in groups]
    packing = Packing.of(lengths, device, unread=[group.unread for group in groups])
    sequences = [(group.prefix, 0) for group in groups]
    sequences += [(tail, len(group.prefix)) for group in groups for tail in group.tails]
    ids = list[int]()
    positions = list[int]()
    for tokens, first in sequences:
        ids += tokens
        positions += range(first, first + len(tokens))
    # At least one token, as in `plain_layout`.
    inputs = packed_inputs(torch.tensor([ids or [0]]), torch.tensor([positions or [0]]), packing)
    return _layout(inputs, batch, _predicting_tokens(groups, packing), device, with_ends)


def _predicting_tokens(groups: Sequence["_TokenGroup"], packing: Packing) -> list[list[int]]:
    """Return for each row the indices of the tokens that predict its completion."""
    indices = list[list[int]]()
    for group, packed_group in zip(groups, packing.groups, strict=True):
        prefix = packed_group.prefix
        shared = range(prefix.start + group.unread, prefix.stop)
        start = packed_group.all_tails.start
        for tail in group.tails:
            indices.append([*shared, *range(start, start + len(tail))])
            start += len(tail)
    return indices


class _TokenGroup(NamedTuple):
    """The tokens of a group."""

    unread: int  # tokens of the prompt that predict no completion token: all but the last
    prefix: list[int]  # the prompt, and the common prefix of its completions
    tails: list[list[int]]  # the rest of each completion


def _groups(batch: Rows, with_ends: bool, shares_more: bool) -> Iterator[_TokenGroup]:
    pairs = zip(batch.prefixes, map(list, batch.completion_ids), strict=True)
    for prefix, rows in groupby(pairs, key=itemgetter(0)):
        prompt = list(prefix.ids)
        completions = [ids for _, ids in rows]
        starts = [ids[:-1] for ids in completions if ids] if prompt and shares_more else [[]]
        # What the first and the last in lexicographic order share, all share.
        first = min(starts, default=[])
        last = max(starts, default=[])
        shared = common_prefix_length(first, last)
        stop = None if with_ends else -1
        tails = [ids[shared:stop] for ids in completions]
        yield _TokenGroup(max(0, len(prompt) - 1), prompt + first[:shared], tails)


def _layout(
    inputs: dict[str, Any],
    batch: Rows,
    indices: Sequence[Sequence[int]],
    device: torch.device,
    with_ends: bool,
) -> Layout:
    """Make a layout, from the indices of each row's tokens from the first that predicts on."""
    sources, targets, cells, ends, rows = (list[int]() for _ in range(5))
    width = max(map(len, batch.completion_ids), default=0)
    for row, (prefix, ids) in enumerate(zip(batch.prefixes, batch.completion_ids, strict=True)):
        first = 0 if len(prefix) else 1  # nothing predicts the first token of a document
        count = max(0, len(ids) - first)
        sources += indices[row][:count]
        targets += ids[first:]
        cells += range(row * width + first, row * width + first + count)
        if with_ends and len(prefix) + len(ids):
            rows.append(row)
            ends.append(indices[row][count])
    # At least one prediction, so that empty rows make a valid input. Equal pairs of source and
    # target, of completions with a common prefix, are one prediction.
    base = max(targets, default=0) + 1
    pairs = torch.tensor(sources or [0]) * base + torch.tensor(targets or [0])
    pairs, predictions = pairs.unique(return_inverse=True)
    distinct_sources = pairs // base
    columns = inputs["input_ids"].shape[1]

    # Made on the host and read on the device alone, so the host need not wait for the copies.
    def move(value: T) -> T:
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    return Layout(
        inputs=tree_map(move, inputs),
        shape=(len(batch), width),
        sources=move(distinct_sources),
        targets=move(pairs % base),
        predictions=move(predictions[: len(cells)]),
        cells=move(torch.tensor(cells, dtype=torch.long)),
        ends=move(torch.tensor(ends, dtype=torch.long)),
        rows=move(torch.tensor(rows, dtype=torch.long)),
        logits_to_keep=columns - int((distinct_sources % columns).min()),
    )


def packed_inputs(
    ids: Tensor, positions: Tensor, layout: AttentionLayout | Packing
) -> dict[str, Any]:
    """Inputs of a model for tokens (R, S) whose attention follows a layout."""
    return {
        "input_ids": ids,
        "position_ids": positions,
        # A 4-D mask is passed through unchanged; the attention reads the layout instead.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),
        KEYWORD: layout,
    }


def wants_passes(model: nn.Module, layout: Layout) -> bool:
    """Whether passes over prefixes and tails save memory: layers keep nothing for the backward."""
    packing = layout.inputs.get(KEYWORD)
    tokens = layout.inputs["input_ids"].shape[1]
    if not isinstance(packing, Packing) or tokens <= SHORTEST_PASS:
        return False
    causal = causal_model(model)
    prefix_tokens = packing.groups[-1].prefix.stop
    saved_tokens = min(tokens - prefix_tokens, tokens // 2)
    saves = recomputes(causal) and saved_tokens * working_bytes(causal) >= gradient_bytes(causal)
    return 0 < prefix_tokens < tokens and (saves or not torch.is_grad_enabled())


def gradient_bytes(causal: PreTrainedModel) -> int:
    """Bytes of accumulated gradients, which is what passes need in addition.

    Autograd sums the gradients of several passes apart before it adds them to `.grad`.
    """
    # Those of embedding and head are added in place as they arise.
    ends = (causal.get_input_embeddings(), causal.get_output_embeddings())
    in_place = {id(getattr(end, "weight", None)) for end in ends}
    gradients = (p.grad for p in causal.parameters() if id(p) not in in_place)
    return sum(gradient.nbytes for gradient in gradients if gradient is not None)


def working_bytes(causal: PreTrainedModel) -> int:
    """Estimate the bytes that a layer needs for a token: norms, attention and gated MLP."""
    config = causal.config.get_text_config()
    hidden: int = config.hidden_size
    heads: int = config.num_attention_heads
    width: int = heads * (getattr(config, "head_dim", None) or hidden // heads)
    inner: int = getattr(config, "intermediate_size", None) or 4 * hidden
    return 4 * (6 * hidden + 6 * width + 3 * inner)


def recomputes(causal: PreTrainedModel) -> bool:
    """Whether layers use non-reentrant checkpointing, where gradients reach captured tensors."""
    layers = [m for m in causal.modules() if getattr(m, "gradient_checkpointing", False)]
    options = dict(checkpointed_layers(causal))
    reentrant = any(options.get(layer, {}).get("use_reentrant") is not False for layer in layers)
    return bool(layers) and causal.training and not reentrant


def run_passes(
    model: nn.Module, layout: Layout, run: Callable[..., Any], cache: PrefixCache
) -> Capture:
    """Run a packed layout in passes; return its hidden states (1, T, H), as of one forward.

    `run` computes the prefixes. `cache` must be empty, and must live until the backward pass ends.
    """
    packing: Packing = layout.inputs[KEYWORD]
    prefixes = [group.prefix for group in packing.groups]
    groups_without_tails = tuple(replace(group, tails=()) for group in packing.groups)
    prefix_packing = Packing(groups_without_tails, packing.device, cache)
    with capture_hidden(model) as capture:
        run(**slice_inputs(layout, slice(0, prefixes[-1].stop), prefix_packing))
    return _run_tails(model, layout, prefixes, capture, cache)


def _run_tails(
    model: nn.Module,
    layout: Layout,
    cached_prefixes: Sequence[slice],
    prefix_states: Capture,
    cache: PrefixCache,
) -> Capture:
    """Compute the tails of a layout; return the hidden states of its prefixes and tails.

    `cached_prefixes` says where the prefixes of the groups are in the cache.
    """
    device = layout.sources.device
    states = [prefix_states.states()]
    pairs = zip(cached_prefixes, layout.inputs[KEYWORD].groups, strict=True)
    tails = [Tail(prefix, *tail) for prefix, group in pairs for tail in group.tails]
    remaining = iter(tails)
    for count in tails_of_passes([tail.stop - tail.start for tail in tails], states[0].shape[1]):
        tokens, packing = Packing.of_tails(list(islice(remaining, count)), cache, device)
        with autocast_to(device, prefix_states.autocast):
            decoder = causal_model(model).base_model
            states.append(decoder(**slice_inputs(layout, tokens, packing), use_cache=False)[0])
    return Capture(torch.cat(states, 1), prefix_states.autocast)


def run_on_cached_prompts(
    model: nn.Module, layout: Layout, earlier: Layout, capture: Capture
) -> Capture:
    """Compute the hidden states (1, T, H) of a layout from the prompts cached by an earlier one.

    Both have the same prompts in the same order; `capture` holds the states of the earlier layout.
    """
    earlier_packing: Packing = earlier.inputs[KEYWORD]
    if earlier_packing.cache is None:
        raise ValueError("The earlier layout has no cache.")
    groups = layout.inputs[KEYWORD].groups
    prompts = [
        slice(cached.prefix.start, cached.prefix.start + group.prefix.stop - group.prefix.start)
        for group, cached in zip(groups, earlier_packing.groups, strict=True)
    ]
    states = capture.states().detach()
    prompt_states = torch.cat([states[:, prompt] for prompt in prompts], 1)
    prefix_states = Capture(prompt_states, capture.autocast)
    with evaluating(model):
        return _run_tails(model, layout, prompts, prefix_states, earlier_packing.cache)


def slice_inputs(layout: Layout, tokens: slice, packing: Packing) -> dict[str, Any]:
    """Inputs of a model for some tokens of a packed layout, with a packing of their own."""
    ids: Tensor = layout.inputs["input_ids"]
    return packed_inputs(ids[:, tokens], layout.inputs["position_ids"][:, tokens], packing)


def tails_of_passes(lengths: Sequence[int], prefix: int) -> list[int]:
    """Return how many tails of these lengths each pass computes."""
    # Tails need more working memory per token than prefixes, as they are gathered by length.
    return runs_within(max(SHORTEST_TAIL_PASS, prefix // 2), lengths)


def runs_within(limit: int, lengths: Iterable[int]) -> list[int]:
    """Divide a sequence of lengths into runs of at most `limit`, or of one; return their counts."""
    counts = list[int]()
    total = 0
    for length in lengths:
        if not counts or total + length > limit:
            counts.append(0)
            total = 0
        counts[-1] += 1
        total += length
    return counts
