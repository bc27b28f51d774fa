"""Decoding in which all rows of a prompt read one copy of its keys and values.

Each distinct prompt is computed once, without padding. Then all rows advance together by one token
per step, each with a short key-value cache of its own for its completion. The output head processes
a few rows at a time, to bound the memory of logits.
"""

import math
import sys
from collections import ChainMap, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice

import torch
from torch import Tensor, nn
from transformers import Cache, RepetitionPenaltyLogitsProcessor

from ...memory.progress import finish
from ...models.layout_check import Comparison, Results, coarsest, windows
from ...models.lm_head import HeadFinder, OutputHead
from ...models.packed_attention import Decoding
from ...models.packed_layout import PREFILL_TOKENS, packed_inputs, runs_within
from ...models.packed_row import Packing, PrefixCache, States, Window
from ...models.recurrent import RecurrentStateCache
from ...models.scorer import TokenReader, read_plain_rows
from ...models.unwrap import autocast_to, causal_model, current_autocast, evaluating
from ...models.weights import working_precision
from ...ops.linear_logprobs import default_chunk
from ...ops.masking import pad_ragged
from ...types import Prefix, Prompts, Rows
from ..base import Sampling
from .sampler import NonFiniteLogitsError, logits_warpers, sample_tokens, uniform_draws

MIN_CAPACITY = 16  # tokens
COMPARED_TOKENS = 4  # of each completion, when decoding is compared with plain rows


class GrowingCache(RecurrentStateCache, Cache):
    """A key-value cache whose buffers double when they are full, so appending copies little."""

    def __init__(
        self,
        max_length: int = sys.maxsize,
        windows: Mapping[int, Window | None] | None = None,  # of the layers that have one
        states: States | None = None,  # of recurrent layers, for each row
    ) -> None:
        Cache.__init__(self, layers=[])
        RecurrentStateCache.__init__(self, states)
        # The number of tokens that a layer keeps, which a window bounds.
        self._max_lengths: dict[int, int] = defaultdict(lambda: max_length)
        for layer, window in (windows or {}).items():
            if window is not None:
                self._max_lengths[layer] = min(window.size, max_length)
        self._buffers: dict[int, list[Tensor]] = {}  # keys and values (m, K, capacity, D)
        self._lengths: dict[int, int] = {}  # tokens appended to each layer

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values (m, K, s, D) to a layer; return all that the layer holds."""
        # Rotary embeddings can leave keys in float32 where attention reads half precision.
        key_states = key_states.to(value_states.dtype)
        count = key_states.shape[2]
        if layer_idx not in self._buffers:
            self._buffers[layer_idx] = [key_states.contiguous(), value_states.contiguous()]
            self._lengths[layer_idx] = count
            return self.layer(layer_idx)
        # In a full window a new token overwrites the oldest one; their order does not matter.
        start = self._lengths[layer_idx] % self._max_lengths[layer_idx]
        self._reserve(layer_idx, used=start, needed=start + count)
        for buffer, new in zip(self._buffers[layer_idx], (key_states, value_states), strict=True):
            buffer[:, :, start : start + count] = new
        self._lengths[layer_idx] += count
        return self.layer(layer_idx)

    def _reserve(self, layer: int, used: int, needed: int) -> None:
        """Make the buffers of a layer hold `needed` tokens, and copy the first `used` ones."""
        for index, buffer in enumerate(self._buffers[layer]):
            if needed > buffer.shape[2]:
                capacity = min(self._max_lengths[layer], max(MIN_CAPACITY, 2 * needed))
                larger = buffer.new_empty(*buffer.shape[:2], capacity, buffer.shape[3])
                larger[:, :, :used] = buffer[:, :, :used]
                self._buffers[layer][index] = larger

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values (m, K, t, D) of a layer."""
        key, value = self._buffers[index]
        length = min(self._lengths[index], self._max_lengths[index])
        return key[:, :, :length], value[:, :, :length]

    def select_rows(self, rows: Tensor) -> None:
        """Drop all rows but those whose indices are given."""
        for layer, buffers in self._buffers.items():
            self._buffers[layer] = [buffer[rows] for buffer in buffers]
        self.states = {name: state[rows] for name, state in self.states.items()}

    def get_seq_length(self, layer_idx: int | None = 0, *args: object) -> int:
        """Return the number of tokens appended to a layer, by default to the first one."""
        first = next(iter(self._lengths.values()), 0)
        return self._lengths.get(layer_idx or 0, first)

    def __len__(self) -> int:
        return len(self._buffers)


@dataclass(frozen=True)
class ComputedPrefix:
    """What decoding needs of a prompt after prefill."""

    layers: dict[int, tuple[Tensor, Tensor]]  # keys and values (1, K, P, D)
    hidden: Tensor  # (H,) of its last token
    states: States  # of recurrent layers


class _RowBatch:
    """The m unfinished rows of a batch, in order, and the completions of all rows.

    The tensors that a decoding step needs stay on the device, so a step copies nothing to it.
    """

    def __init__(
        self,
        prefixes: Sequence[Prefix],
        draws: Tensor | None,  # (m, max_tokens) random numbers in [0, 1); None: greedy
        is_penalized: bool,  # whether there is a repetition penalty
        device: torch.device,  # of the model
    ):
        self.prefixes = prefixes
        self.unfinished = list(range(len(prefixes)))  # indices of rows
        self.completion_ids: list[list[int]] = [[] for _ in prefixes]
        self.logps: list[list[float]] = [[] for _ in prefixes]
        lengths = list(map(len, prefixes))
        self.prompt_lengths = torch.tensor(lengths).to(device, non_blocking=True)  # (m,)
        self.draws = None if draws is None else draws.to(device, non_blocking=True)
        # (m, w) ids with a repetition penalty. Short prompts are padded with their first id: a
        # repeated id is penalized once.
        self.penalized_ids: Tensor | None = None
        if is_penalized:
            width = max(lengths)
            ids = [[*x.ids, *[x.ids[0]] * (width - len(x))] for x in prefixes]
            self.penalized_ids = torch.tensor(ids).to(device, non_blocking=True)

    def append(
        self, tokens: Sequence[float], logps: Sequence[float], stop_ids: Sequence[int]
    ) -> list[int]:
        """Append a token to each unfinished row; return the indices (in m) of rows that go on."""
        bad_rows = [
            row for row, logp in zip(self.unfinished, logps, strict=True) if math.isnan(logp)
        ]
        if bad_rows:
            raise NonFiniteLogitsError(bad_rows)
        remaining = []
        new_tokens = zip(self.unfinished, map(int, tokens), logps, strict=True)
        for index, (row, token, logp) in enumerate(new_tokens):
            self.completion_ids[row].append(token)
            self.logps[row].append(logp)
            if token not in stop_ids:
                remaining.append(index)
        finish(len(self.unfinished) - len(remaining))
        self.unfinished = [self.unfinished[index] for index in remaining]
        return remaining

    def select_rows(self, indices: Tensor) -> None:
        """Drop from the device all rows but those that `append` returned."""
        self.prompt_lengths = self.prompt_lengths[indices]
        self.draws = None if self.draws is None else self.draws[indices]
        if self.penalized_ids is not None:
            self.penalized_ids = self.penalized_ids[indices]


class SharedPrefixDecoder:
    """Completes rows with a model that supports packed layouts, under the current autocast.

    The model is in evaluation mode; its head computes logits at temperature 1. With
    `do_sample=False` decoding is greedy.
    """

    def __init__(self, model: nn.Module, head: OutputHead, sampling: Sampling):
        causal = causal_model(model)
        self._decoder = causal.base_model
        self._device = next(causal.parameters()).device
        self._head = head
        self._sampling = sampling
        self._warpers = logits_warpers(sampling)
        self._computed: dict[Prefix, ComputedPrefix] = {}
        self._windows: dict[int, Window | None] = {}  # by layer
        self._autocast = current_autocast(self._device)

    @torch.no_grad()
    def __call__(
        self, prefixes: Sequence[Prefix], seeds: Sequence[int]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Complete rows; rows with equal prefixes must be consecutive.

        Prefixes that the previous call computed are reused. Returns the token ids of each
        completion, stop token included, and the log-probability of each token at the sampling
        temperature, before filters. Raises `NonFiniteLogitsError`, which names rows.
        """
        sampling = self._sampling
        draws = None
        if sampling.extra.get("do_sample", True):
            draws = uniform_draws(seeds, sampling.max_tokens)
        rows = _RowBatch(prefixes, draws, sampling.repetition_penalty != 1.0, self._device)
        self._prefill(list(dict.fromkeys(prefixes)))
        computed = [self._computed[prefix] for prefix in prefixes]
        hidden = torch.stack([prefix.hidden for prefix in computed])
        states = {
            name: torch.cat([prefix.states[name] for prefix in computed])
            for name in computed[0].states
        }
        cache = GrowingCache(sampling.max_tokens, self._windows, states)
        for step in range(sampling.max_tokens):
            tokens, logps = self._sample(hidden, rows, step)
            tokens = self._append(rows, tokens, logps, cache)
            if not rows.unfinished or step + 1 == sampling.max_tokens:
                break
            hidden = self._forward(tokens, rows, cache, rows.prompt_lengths[:, None] + step)
        return rows.completion_ids, rows.logps

    def _prefill(self, prefixes: Sequence[Prefix]) -> None:
        """Compute the prefixes that the previous call did not, a few at a time; drop all others."""
        reused = {prefix: self._computed[prefix] for prefix in prefixes if prefix in self._computed}
        if len(reused) < len(self._computed):
            for computed in reused.values():
                # Copy: a view would keep the keys and values of dropped prefixes in memory.
                for layer, (key, value) in computed.layers.items():
                    computed.layers[layer] = (key.clone(), value.clone())
        self._computed = reused
        missing = [prefix for prefix in prefixes if prefix not in reused]
        remaining = iter(missing)
        for count in runs_within(PREFILL_TOKENS, map(len, missing)):
            self._prefill_packed(list(islice(remaining, count)))

    def _prefill_packed(self, prefixes: Sequence[Prefix]) -> None:
        """Compute prefixes in one packed row."""
        layers = PrefixCache()
        packing = Packing.of([(len(prefix), []) for prefix in prefixes], self._device, layers)
        ids = self._tensor([[token for prefix in prefixes for token in prefix.ids]])
        positions = self._tensor([[i for prefix in prefixes for i in range(len(prefix))]])
        inputs = packed_inputs(ids, positions, packing)
        output = self._decoder(**inputs, past_key_values=GrowingCache(), use_cache=True)
        hidden = output[0][0]  # (T, H)
        start = 0
        for prefix in prefixes:
            stop = start + len(prefix)
            states = [state for (_, begin), state in layers.states.items() if begin == start]
            self._computed[prefix] = ComputedPrefix(
                layers={layer: self._visible(layers, layer, start, stop) for layer in layers},
                hidden=hidden[stop - 1].clone(),
                states=dict(ChainMap(*states)),
            )
            start = stop

    def _visible(
        self, layers: PrefixCache, layer: int, start: int, stop: int
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the prompt at `start` to `stop` that new tokens can see."""
        key, value = layers[layer]
        window = layers.windows[layer]
        self._windows[layer] = window
        if window is None or window.is_chunked or stop - start < window.size:
            return key[:, :, start:stop], value[:, :, start:stop]
        first = stop - window.size + 1
        # Copy: a view would keep the tokens outside the window in memory.
        return key[:, :, first:stop].clone(), value[:, :, first:stop].clone()

    def _forward(
        self, tokens: Tensor, rows: _RowBatch, cache: GrowingCache, positions: Tensor
    ) -> Tensor:
        """Return the hidden states (m, H) of the tokens (m,) at positions (m, 1)."""
        computed: list[ComputedPrefix] = []
        groups: list[slice] = []  # the unfinished rows of each prefix
        start = 0
        for prefix, group in groupby(rows.prefixes[row] for row in rows.unfinished):
            computed.append(self._computed[prefix])
            stop = start + len(list(group))
            groups.append(slice(start, stop))
            start = stop
        layers = {
            layer: [prefix.layers[layer] for prefix in computed] for layer in computed[0].layers
        }
        inputs = packed_inputs(tokens[:, None], positions, Decoding(tuple(groups), layers))
        return self._decoder(**inputs, past_key_values=cache, use_cache=True)[0][:, 0]

    def _sample(self, hidden: Tensor, rows: _RowBatch, step: int) -> tuple[Tensor, Tensor]:
        """Return the next token (m,) of each unfinished row and its log-probability (m,)."""
        chunk_size = self._head.chunk or default_chunk(self._device)
        rows_per_chunk = max(1, chunk_size // self._head.vocabulary)
        all_tokens = []
        all_logps = []
        for start in range(0, len(hidden), rows_per_chunk):
            chunk = slice(start, start + rows_per_chunk)
            logits = self._head.logits(hidden[chunk], self._autocast)
            logps = (logits / self._sampling.temperature).log_softmax(-1)
            scores = logits
            if rows.penalized_ids is not None:
                penalty = RepetitionPenaltyLogitsProcessor(self._sampling.repetition_penalty)
                scores = penalty(rows.penalized_ids[chunk], logits)
            if rows.draws is None:
                tokens = scores.argmax(-1)
            else:
                filtered = self._warpers(None, scores)  # none of the filters reads input ids
                tokens = sample_tokens(filtered, rows.draws[chunk, step])
            all_tokens.append(tokens)
            all_logps.append(logps.gather(1, tokens[:, None])[:, 0])
        return torch.cat(all_tokens), torch.cat(all_logps)

    def _append(
        self, rows: _RowBatch, tokens: Tensor, logps: Tensor, cache: GrowingCache
    ) -> Tensor:
        """Append a token to each row and drop finished rows; return the tokens of the others."""
        # The only time in a step that the host waits for the device. Doubles hold ids exactly.
        ids, values = torch.stack([tokens.double(), logps.double()]).tolist()
        remaining = rows.append(ids, values, self._sampling.stop_ids)
        if rows.penalized_ids is not None:
            rows.penalized_ids = torch.cat([rows.penalized_ids, tokens[:, None]], 1)
        if len(remaining) == len(tokens):
            return tokens
        indices = self._tensor(remaining).long()
        cache.select_rows(indices)
        rows.select_rows(indices)
        return tokens[indices]

    def _tensor(self, values: Sequence[object]) -> Tensor:
        return torch.tensor(values).to(self._device, non_blocking=True)


def decoding_comparison(
    model: nn.Module, prompts: Prompts, sampling: Sampling, pad_id: int
) -> Comparison:
    """Compare this decoding with plain rows: two completions of the longest prompt, scored twice.

    If prompts fit into a layer's window and completions will exceed it, the prompt is repeated to
    exceed it, too.
    """
    causal = causal_model(model)
    device = next(causal.parameters()).device
    prompt = max(prompts.token_ids, key=len)
    max_length = len(prompt) + sampling.max_tokens
    for window in windows(causal):
        if len(prompt) <= window < max_length:
            prompt = (prompt * (window // len(prompt) + 1))[: window + 1]
    prefix = Prefix(prompt)
    short = sampling.replace(
        max_tokens=min(COMPARED_TOKENS, sampling.max_tokens), temperature=1.0, extra={}
    )

    def compute(autocast: torch.dtype | None) -> Results:
        head = HeadFinder(1.0).find(causal)
        assert head is not None
        with evaluating(causal), autocast_to(device, autocast):
            # Two seeds, so that the completions differ.
            ids, logps = SharedPrefixDecoder(causal, head, short)([prefix] * 2, (0, 1))
        rows = Rows.of([(prompt, completion) for completion in ids])
        plain = read_plain_rows(causal, TokenReader(head), rows, pad_id, autocast)
        packed = pad_ragged(logps, 0.0, dtype=plain.dtype).to(plain.device)
        return Results(packed, plain, coarsest(working_precision(causal), autocast))

    return Comparison(
        quantity="log-probabilities of decoding",
        length=len(prompt),
        longest=max(max_length, len(prompt)),
        autocast=partial(current_autocast, device),
        compute=compute,
    )
