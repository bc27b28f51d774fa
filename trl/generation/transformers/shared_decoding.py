"""Decoding in which the rows of a prompt read one copy of its keys and values.

Each distinct prompt is computed once, without padding. Then all rows advance together by one token
per step, each with its own short cache; logits exist for a few rows at a time.
"""

import math
import sys
from collections import ChainMap, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, RepetitionPenaltyLogitsProcessor

from ...models.layout_check import Comparison, Results, coarsest, windows
from ...models.lm_head import HeadFinder, OutputHead
from ...models.packed_attention import Decoding
from ...models.packed_layout import PREFILL_TOKENS, packed_inputs, runs_within
from ...models.packed_places import Layers, Packing, States, Window
from ...models.recurrent import Fork
from ...models.scorer import TokenReader, read_plain_rows
from ...models.unwrap import autocast_to, causal_model, current_autocast, evaluating
from ...models.weights import working_precision
from ...ops.linear_logprobs import default_chunk
from ...ops.masking import pad_ragged
from ...progress import finish
from ...types import Prefix, Prompts, Rows
from ..base import Sampling
from .sampler import NonFiniteLogitsError, pick, uniforms, warpers

SMALLEST_CAPACITY = 16
CHECKED_TOKENS = 4  # that rows write when decoding is compared with plain rows


class GrowingCache(Fork, Cache):
    """Keys and values of each layer in buffers that double, so that appending copies little."""

    def __init__(
        self,
        limit: int = sys.maxsize,
        windows: Mapping[int, Window | None] | None = None,
        states: States | None = None,  # of recurrent layers, for each row
    ) -> None:
        Cache.__init__(self, layers=[])
        Fork.__init__(self, states)
        found = (windows or {}).items()
        rooms = {layer: min(window.size, limit) for layer, window in found if window}
        self._rooms: dict[int, int] = defaultdict(lambda: limit, rooms)  # that a layer keeps
        self._buffers: dict[int, list[Tensor]] = {}
        self._lengths: dict[int, int] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append (m, K, s, D) to a layer and return all it holds."""
        # Rotary embeddings can leave keys in float32 where attention reads half precision.
        key_states = key_states.to(value_states.dtype)
        if layer_idx not in self._buffers:
            self._buffers[layer_idx] = [x.contiguous() for x in (key_states, value_states)]
            self._lengths[layer_idx] = key_states.shape[2]
            return self.layer(layer_idx)
        room, count = self._rooms[layer_idx], key_states.shape[2]
        # One token at a time takes the place of the oldest: their order does not matter.
        start = self._lengths[layer_idx] % room
        for place, new in enumerate((key_states, value_states)):
            held = self._buffers[layer_idx][place]
            if start + count > held.shape[2]:
                capacity = min(room, max(SMALLEST_CAPACITY, 2 * (start + count)))
                grown = held.new_empty(*held.shape[:2], capacity, held.shape[3])
                grown[:, :, :start] = held[:, :, :start]
                held = self._buffers[layer_idx][place] = grown
            held[:, :, start : start + count] = new
        self._lengths[layer_idx] += count
        return self.layer(layer_idx)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values (m, K, t, D) of a layer."""
        key, value = self._buffers[index]
        held = min(self._lengths[index], self._rooms[index])
        return key[:, :, :held], value[:, :, :held]

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but the given ones."""
        for buffers in self._buffers.values():
            for place, held in enumerate(buffers):
                buffers[place] = held[rows]
        self.states = {name: state[rows] for name, state in self.states.items()}

    def get_seq_length(self, layer_idx: int | None = 0, *args: Any) -> int:
        """Tokens held."""
        first = next(iter(self._lengths.values()), 0)
        return self._lengths.get(layer_idx or 0, first)

    def __len__(self) -> int:
        return len(self._buffers)


@dataclass(frozen=True)
class ComputedPrefix:
    """What is kept of a prompt that has been computed."""

    layers: dict[int, tuple[Tensor, Tensor]]  # keys and values (1, K, P, D)
    hidden: Tensor  # (H,) at its last token
    states: States  # of recurrent layers


class _Rows:
    """The unfinished rows of a batch, in order, and what all rows wrote.

    The device holds all that a step needs of m unfinished rows, so nothing is copied to it.
    """

    def __init__(
        self,
        prefixes: Sequence[Prefix],
        draws: Tensor | None,  # (m, steps) random numbers; None: greedy
        is_penalized: bool,  # whether tokens seen before become less likely
        device: torch.device,  # of the model
    ):
        self.prefixes = prefixes
        self.numbers = list(range(len(prefixes)))  # of the unfinished rows
        self.written: list[list[int]] = [[] for _ in prefixes]
        self.logps: list[list[float]] = [[] for _ in prefixes]
        lengths = list(map(len, prefixes))
        self.lengths = torch.tensor(lengths).to(device, non_blocking=True)  # (m,) of the prompts
        self.draws = None if draws is None else draws.to(device, non_blocking=True)
        self.seen = None  # (m, w) ids that are penalized; short prompts repeat their first one
        if is_penalized:
            width = max(lengths)
            seen = [[*x.ids, *[x.ids[0]] * (width - len(x))] for x in prefixes]
            self.seen = torch.tensor(seen).to(device, non_blocking=True)

    def keep(self, places: Tensor) -> None:
        """Drop from the device all rows but those that `note` said go on."""
        self.lengths = self.lengths[places]
        self.draws = None if self.draws is None else self.draws[places]
        self.seen = None if self.seen is None else self.seen[places]

    def note(
        self, tokens: Sequence[float], logps: Sequence[float], stops: Sequence[int]
    ) -> list[int]:
        """Append a token to each unfinished row; returns the places of those that go on."""
        bad = [row for row, logp in zip(self.numbers, logps, strict=True) if math.isnan(logp)]
        if bad:
            raise NonFiniteLogitsError(bad)
        alive = []
        steps = zip(self.numbers, map(int, tokens), logps, strict=True)
        for place, (number, token, logp) in enumerate(steps):
            self.written[number].append(token)
            self.logps[number].append(logp)
            if token not in stops:
                alive.append(place)
        finish(len(self.numbers) - len(alive))
        self.numbers = [self.numbers[place] for place in alive]
        return alive


class SharedDecoder:
    """Completes rows with a model that understands packed layouts, under autocast if it is on.

    The model is in evaluation mode, its head at temperature 1; `do_sample=False` is greedy.
    """

    def __init__(self, model: Any, head: OutputHead, sampling: Sampling):
        causal = causal_model(model)
        self._decoder = causal.base_model
        self._device = next(causal.parameters()).device
        self._head = head
        self._sampling = sampling
        self._warpers = warpers(sampling)
        self._computed: dict[Prefix, ComputedPrefix] = {}
        self._windows: dict[int, Window | None] = {}  # of the layers
        self._autocast = current_autocast(self._device)

    @torch.no_grad()
    def __call__(
        self, prefixes: Sequence[Prefix], seeds: Sequence[int]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Complete rows, of which those of a prefix stand next to each other.

        Prefixes computed by the last call are used again. Returned are token ids of each row, stop
        token included, and the log-probability of each at the sampling temperature, before filters.
        `NonFiniteLogitsError` names rows.
        """
        limit = self._sampling.max_tokens
        draws = uniforms(seeds, limit) if self._sampling.extra.get("do_sample", True) else None
        rows = _Rows(prefixes, draws, self._sampling.repetition_penalty != 1.0, self._device)
        self._prefill(list(dict.fromkeys(prefixes)))
        computed = [self._computed[prefix] for prefix in prefixes]
        hidden = torch.stack([prefix.hidden for prefix in computed])
        names = computed[0].states
        states = {name: torch.cat([x.states[name] for x in computed]) for name in names}
        cache = GrowingCache(limit, self._windows, states)
        for step in range(limit):
            tokens = self._advance(rows, *self._choose(hidden, rows, step), cache)
            if not rows.numbers or step + 1 == limit:
                break
            hidden = self._forward(tokens, rows, cache, rows.lengths[:, None] + step)
        return rows.written, rows.logps

    def _prefill(self, prefixes: Sequence[Prefix]) -> None:
        """Compute prefixes that the last call did not, a few at a time, and forget all others."""
        reused = {prefix: self._computed[prefix] for prefix in prefixes if prefix in self._computed}
        if len(reused) < len(self._computed):
            for computed in reused.values():
                # Views keep alive all that they were computed with.
                for layer, (key, value) in computed.layers.items():
                    computed.layers[layer] = key.clone(), value.clone()
        self._computed = reused
        missing = [prefix for prefix in prefixes if prefix not in reused]
        remaining = iter(missing)
        for count in runs_within(PREFILL_TOKENS, map(len, missing)):
            self._prefill_packed(list(islice(remaining, count)))

    def _prefill_packed(self, prefixes: Sequence[Prefix]) -> None:
        kept = Layers()
        packing = Packing.of([(len(prefix), []) for prefix in prefixes], self._device, kept)
        ids = self._tensor([[token for prefix in prefixes for token in prefix.ids]])
        positions = self._tensor([[i for prefix in prefixes for i in range(len(prefix))]])
        hidden = self._decoder(
            **packed_inputs(ids, positions, packing), past_key_values=GrowingCache(), use_cache=True
        )[0][0]
        start = 0
        for prefix in prefixes:
            at = slice(start, start + len(prefix))
            layers = {layer: self._kept(kept, layer, at) for layer in kept}
            states = [state for (_, first), state in kept.states.items() if first == start]
            self._computed[prefix] = ComputedPrefix(
                layers, hidden[at.stop - 1].clone(), dict(ChainMap(*states))
            )
            start = at.stop

    def _kept(self, kept: Layers, layer: int, at: slice) -> tuple[Tensor, Tensor]:
        """Keys and values of a prompt that decoding will look at."""
        window, (key, value) = kept.windows[layer], kept[layer]
        self._windows[layer] = window
        if window is None or window.is_chunked or at.stop - at.start < window.size:
            return key[:, :, at], value[:, :, at]
        # A view would keep alive all that the layer no longer sees.
        last = slice(at.stop - window.size + 1, at.stop)
        return key[:, :, last].clone(), value[:, :, last].clone()

    def _forward(
        self, tokens: Tensor, rows: _Rows, cache: GrowingCache, positions: Tensor
    ) -> Tensor:
        computed: list[ComputedPrefix] = []
        places: list[slice] = []
        start = 0
        for prefix, run in groupby(rows.prefixes[number] for number in rows.numbers):
            computed.append(self._computed[prefix])
            places.append(slice(start, start + len(list(run))))
            start = places[-1].stop
        layers = {layer: [x.layers[layer] for x in computed] for layer in computed[0].layers}
        inputs = packed_inputs(tokens[:, None], positions, Decoding(tuple(places), layers))
        return self._decoder(**inputs, past_key_values=cache, use_cache=True)[0][:, 0]

    def _choose(self, hidden: Tensor, rows: _Rows, step: int) -> tuple[Tensor, Tensor]:
        """The next token (m,) of each unfinished row, and its log-probability (m,)."""
        size = max(1, (self._head.chunk or default_chunk(self._device)) // self._head.vocabulary)
        chosen, logps = [], []
        for start in range(0, len(hidden), size):
            at = slice(start, start + size)
            logits = self._head.logits(hidden[at], self._autocast)
            every = (logits / self._sampling.temperature).log_softmax(-1)
            scores = logits
            if rows.seen is not None:
                penalty = RepetitionPenaltyLogitsProcessor(self._sampling.repetition_penalty)
                scores = penalty(rows.seen[at], logits)
            if rows.draws is None:
                tokens = scores.argmax(-1)
            else:
                # None of the filters reads the ids of the rows.
                tokens = pick(self._warpers(None, scores), rows.draws[at, step])
            chosen.append(tokens)
            logps.append(every.gather(1, tokens[:, None])[:, 0])
        return torch.cat(chosen), torch.cat(logps)

    def _advance(self, rows: _Rows, tokens: Tensor, logps: Tensor, cache: GrowingCache) -> Tensor:
        """Append a token to each row and drop those that end; returns the tokens of the others."""
        # The one time in a step that the host waits for the device. Ids are exact in double.
        ids, values = torch.stack([tokens.double(), logps.double()]).tolist()
        alive = rows.note(ids, values, self._sampling.stop_ids)
        if rows.seen is not None:
            rows.seen = torch.cat([rows.seen, tokens[:, None]], 1)
        if len(alive) == len(tokens):
            return tokens
        places = self._tensor(alive).long()
        cache.keep(places)
        rows.keep(places)
        return tokens[places]

    def _tensor(self, values: Any) -> Tensor:
        return torch.tensor(values).to(self._device, non_blocking=True)


def decoding_comparison(
    model: nn.Module, prompts: Prompts, sampling: Sampling, pad_id: int
) -> Comparison:
    """Compare log-probabilities of what two rows of the longest prompt write with plain rows."""
    causal = causal_model(model)
    device = next(causal.parameters()).device
    longest = max(prompts.token_ids, key=len)
    ends = len(longest) + sampling.max_tokens
    for window in windows(causal):
        if len(longest) <= window < ends:  # completions will outgrow it, so the check has to
            longest = (longest * (window // len(longest) + 1))[: window + 1]
    prefix = Prefix(longest)
    tokens = min(CHECKED_TOKENS, sampling.max_tokens)
    few = sampling.replace(max_tokens=tokens, temperature=1.0, extra={})

    def compute(autocast: torch.dtype | None) -> Results:
        head = HeadFinder(1.0).find(causal)
        assert head is not None
        with evaluating(causal), autocast_to(device, autocast):
            # Different streams, so that the rows part.
            ids, logps = SharedDecoder(causal, head, few)([prefix] * 2, (0, 1))
        rows = Rows.of([(longest, written) for written in ids])
        plain = read_plain_rows(causal, TokenReader(head), rows, pad_id, autocast)
        packed = pad_ragged(logps, 0.0, dtype=plain.dtype).to(plain.device)
        return packed, plain, coarsest(working_precision(causal), autocast)

    what, most = "log-probabilities of decoding", max(ends, len(longest))
    return Comparison(what, len(longest), most, partial(current_autocast, device), compute)
