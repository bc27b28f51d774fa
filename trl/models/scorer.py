"""Score completions with a model; the one place that decides the layout of its inputs."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..ops.logit_statistics import LogitStatistic
from ..types import Rows, TokenScores
from .last_layer import skip_unread
from .layout_check import Comparison, LayoutCheck, Results, coarsest
from .lm_head import HeadFinder
from .packed_attention import KEYWORD
from .packed_layout import (
    Layout,
    packed_layout,
    plain_layout,
    run_on_cached_prompts,
    run_passes,
    wants_passes,
)
from .packed_row import PrefixCache
from .readers import Hidden, Reader, Readings, TokenReader, first_reading
from .recurrent import recurrent_layers
from .sharded import is_sharded, release
from .unwrap import (
    Capture,
    autocast_of,
    autocast_to,
    capture_hidden,
    causal_model,
    embeddings_in_place,
    evaluating,
    run_inside,
)
from .weights import working_precision

if TYPE_CHECKING:
    from .context_parallel import ContextParallel

Forward = Callable[..., Any]


@dataclass(eq=False, kw_only=True)
class Scorer:
    """Scores completions with one copy of each prompt and one tile of logits at a time.

    If a model cannot share prompts, padded rows are scored. If its logits cannot be reproduced from
    its hidden states, all logits of the completions are held at once. A warning says so.
    """

    pad_id: int  # fills the padding of plain rows; masked, so its value does not matter
    temperature: float  # divides the logits, as it did when the tokens were sampled
    device: torch.device  # where the model is
    pad_multiple: int | None = None  # the width of plain rows becomes a multiple of this
    # Ask a mixture-of-experts model for its load-balancing loss. That counts the prompt of every
    # row, so rows are then plain.
    router_logits: bool = False
    shared_prefix: bool = True  # False: plain rows
    chunk: int | None = None  # logits held at once. None: a measured default; 0: all
    # Add gradients of embedding and head to `.grad` as they arise; not for `torch.autograd.grad`.
    in_place: bool = True

    def __post_init__(self) -> None:
        self.heads = HeadFinder(self.temperature, self.chunk, self.in_place)
        self.check = LayoutCheck(self.shared_prefix and not self.router_logits)
        self.context: ContextParallel | None = None  # ranks that divide the tokens of a row
        self._caches: weakref.WeakSet[PrefixCache] = weakref.WeakSet()  # of forwards in passes

    def __call__(
        self,
        model: nn.Module,
        batch: Rows,
        with_entropy: bool = False,
        statistic: LogitStatistic | None = None,
        value_reader: Reader | None = None,
    ) -> TokenScores:
        """Score every completion token of `batch` under `model`, wrapped or not: (B, C) tensors.

        `with_entropy` adds the entropy of each next-token distribution, and whether the token is
        its top prediction. `statistic` adds a statistic of its logits, `value_reader` the values
        that it reads. All are 0 beyond a completion's end, and for tokens that nothing predicts.
        """
        reader = self.token_reader(model, with_entropy, statistic)
        if value_reader is None:
            (readings,), aux_loss = self.read(model, batch, [reader])
            return reader.scores(readings, aux_loss=aux_loss)
        (readings, (values,)), aux_loss = self.read(model, batch, [reader, value_reader])
        return reader.scores(readings, values, aux_loss)

    def with_others(
        self,
        model: nn.Module,
        batch: Rows,
        others: Rows,
        with_entropy: bool = False,
        statistic: LogitStatistic | None = None,
    ) -> tuple[TokenScores, Tensor]:
        """Score rows and, without gradient, `others` with the same prompts, which run only once.

        Returns the scores of `batch` and the log-probabilities (B, C') of `others`.
        """
        reader = self.token_reader(model, with_entropy, statistic)
        needs_own_forward = is_sharded(model) or self.context or recurrent_layers(model)
        if needs_own_forward or not self.packs(model, batch, [reader]):
            other_logps = self.logps(model, others)
            return self(model, batch, with_entropy, statistic), other_logps
        (readings, other_readings), _ = self.read(model, batch, [reader], others)
        return reader.scores(readings), first_reading(other_readings)

    def token_reader(
        self, model: nn.Module, with_entropy: bool = False, statistic: LogitStatistic | None = None
    ) -> TokenReader:
        """Make a reader of log-probabilities for `model`; arguments as for a call."""
        return TokenReader(self.heads.find(model), self.temperature, with_entropy, statistic)

    def read(
        self, model: nn.Module, batch: Rows, readers: Sequence[Reader], others: Rows | None = None
    ) -> tuple[list[Readings], Tensor | None]:
        """Run one forward of a model and let several readers read its hidden states.

        Returns the results of each reader, and the load-balancing loss () if there is one. With
        `others`, which continue the prompts of `batch`, the first reader also reads these, without
        gradient; its results come last. Rows must be packed then.
        """
        layout = self._layout(model, batch, readers)
        sharded = is_sharded(model)
        if others is not None:
            layout.inputs[KEYWORD] = replace(layout.inputs[KEYWORD], cache=PrefixCache())

        def work(forward: Forward, inputs: dict[str, Any]) -> tuple[list[Readings], Tensor | None]:
            run = self._decoder(model, forward, layout, readers)
            hidden, aux_loss = self._states(model, layout, run, inputs, others is None)
            readings = [reader(hidden) for reader in readers]
            if others is not None:
                with torch.no_grad():
                    other_layout = packed_layout(others, self.device, shares_more=False)
                    capture = run_on_cached_prompts(model, other_layout, layout, hidden.capture)
                    layout.inputs[KEYWORD].cache.close()
                    readings.append(readers[0](Hidden(other_layout, capture)))
            return readings, aux_loss

        with embeddings_in_place(model, self.in_place and not sharded):
            # Readers run inside the forward, so that the hooks of wrappers see their results.
            readings, aux_loss = run_inside(model, layout.inputs | {"use_cache": False}, work)
        if sharded and not torch.is_grad_enabled():
            release(model)
        return readings, aux_loss

    def _decoder(
        self, model: nn.Module, forward: Forward, layout: Layout, readers: Sequence[Reader]
    ) -> Forward:
        """Choose what to call for hidden states: without the head, where that is possible."""
        heads = [reader.head for reader in readers if isinstance(reader, TokenReader)]
        found_heads = [head for head in heads if head is not None]
        if len(found_heads) < len(heads):
            return partial(forward, logits_to_keep=layout.logits_to_keep)
        if not self.router_logits and all(head.sharded for head in found_heads):
            decoder: Forward = causal_model(model).base_model
            return decoder
        no_tokens = torch.empty(0, dtype=torch.long, device=self.device)
        return partial(forward, logits_to_keep=no_tokens if found_heads[0].is_plain else 1)

    def _states(
        self,
        model: nn.Module,
        layout: Layout,
        run: Forward,
        inputs: dict[str, Any],
        allows_passes: bool,
    ) -> tuple[Hidden, Tensor | None]:
        """Compute the last hidden states, in passes if that is allowed and saves memory.

        Also returns the load-balancing loss () if it is asked for.
        """
        output = None
        # In passes, ranks would gather sharded weights at different times.
        if allows_passes and not is_sharded(model) and wants_passes(model, layout):
            cache = PrefixCache()
            self._caches.add(cache)
            capture = run_passes(model, layout, partial(run, use_cache=False), cache)
        else:
            inputs = inputs | {"output_router_logits": self.router_logits or None}
            with capture_hidden(model) as capture:
                output = run(**{name: value for name, value in inputs.items() if value is not None})
        hidden = Hidden(layout, capture, getattr(output, "logits", None))
        return hidden, getattr(output, "aux_loss", None) if self.router_logits else None

    def _layout(self, model: nn.Module, batch: Rows, readers: Sequence[Reader]) -> Layout:
        if self.packs(model, batch, readers):
            with_ends = any(reader.at_last_token for reader in readers)
            layout = packed_layout(batch, self.device, with_ends)
            return layout if self.context is None else self.context.slice(layout)
        if self.context is not None:
            raise ValueError(
                "cp_size (or sp_size) divides packed rows, but this model computes padded ones: a "
                "warning says why, or shared_prefix=False or a load-balancing loss requires them."
            )
        return plain_layout(batch, self.pad_id, self.device, self.pad_multiple)

    def logps(self, model: nn.Module, batch: Rows) -> Tensor:
        """Score without gradient, in evaluation mode: (B, C)."""
        return self.frozen_scores(model, batch).logps

    @torch.no_grad()
    def frozen_scores(
        self,
        model: nn.Module,
        batch: Rows,
        statistic: LogitStatistic | None = None,
        value_reader: Reader | None = None,
        with_entropy: bool = False,
    ) -> TokenScores:
        """Score without gradient, in evaluation mode; the other arguments are those of a call."""
        with evaluating(model):
            return self(model, batch, with_entropy, statistic, value_reader)

    def packs(
        self,
        model: nn.Module,
        batch: Rows,
        readers: Sequence[Reader],
        largest: Callable[[float], float] | None = None,
    ) -> bool:
        """Whether these rows are scored with shared prompts; see `LayoutCheck.allows`."""
        if not all(reader.can_pack for reader in readers):
            return False
        skip_unread(model)
        comparison = scoring_comparison(model, readers[0], batch, self.pad_id)
        return self.check.allows(model, comparison, largest)

    def agree(
        self,
        model: nn.Module,
        batch: Rows,
        largest: Callable[[float], float],
        reader: Reader | None = None,
    ) -> None:
        """Let all ranks decide together on the layout of `batch`; see `LayoutCheck.allows`."""
        self.check.has_agreed = True
        self.packs(model, batch, [reader or self.token_reader(model)], largest)

    def forget(self) -> None:
        """Free the prefix caches of forwards whose backward failed.

        Such a cache and its graph refer to each other, so neither is freed otherwise.
        """
        for cache in self._caches:
            cache.close()
        self._caches.clear()


# --- The check: rows are read in both layouts ---


def scoring_comparison(model: nn.Module, reader: Reader, batch: Rows, pad_id: int) -> Comparison:
    """Compare a reader's first result in both layouts, on the two rows of `two_longest`."""
    length = max(batch.lengths, default=0)
    device = next(model.parameters()).device

    def compute(autocast: torch.dtype | None) -> Results:
        two = batch.select(two_longest(batch))
        plain = read_plain_rows(model, reader, two, pad_id, autocast)
        layout = packed_layout(two, device, reader.at_last_token)
        packed, dtype = _read(model, reader, layout, autocast)
        if reader.compares_relatively and plain.numel():
            size = plain.abs().amax().clamp(min=torch.finfo(plain.dtype).tiny)
            return Results(packed / size, plain / size, dtype)
        return Results(packed, plain, dtype)

    # Wrappers gather sharded weights, and they bring their own autocast.
    def autocast() -> torch.dtype | None:
        return None if is_sharded(model) else autocast_of(model)

    return Comparison(reader.quantity, length, length, autocast, compute)


@torch.no_grad()
def _read(
    model: nn.Module, reader: Reader, layout: Layout, autocast: torch.dtype | None
) -> tuple[Tensor, torch.dtype]:
    """Run the decoder on a layout, without dropout: a reader's first result, and its precision."""
    causal = causal_model(model)

    def work(*_: object) -> tuple[Tensor, Tensor]:
        states = causal.base_model(**layout.inputs, use_cache=False)[0]
        readings = reader(Hidden(layout, Capture(states, autocast)))
        return first_reading(readings), states

    outer = model if is_sharded(model) else causal  # wrappers gather sharded weights
    with evaluating(outer), autocast_to(layout.sources.device, autocast):
        reading, states = run_inside(outer, layout.inputs, work)
    return reading, coarsest(states.dtype, working_precision(causal), autocast)


def read_plain_rows(
    model: nn.Module, reader: Reader, batch: Rows, pad_id: int, autocast: torch.dtype | None
) -> Tensor:
    """Read rows one by one, which needs no padding, no mask and little memory: (B, C) or (B,)."""
    device = next(model.parameters()).device
    batches = [batch.select([row]) for row in range(len(batch))]
    if is_sharded(model):  # all rows in one forward, so that every rank runs as many
        batches = [batch]
    layouts = [plain_layout(x, pad_id, device) for x in batches]
    readings = [row for layout in layouts for row in _read(model, reader, layout, autocast)[0]]
    if reader.at_last_token:
        return torch.stack(readings)
    return pad_sequence(readings, batch_first=True)


def two_longest(batch: Rows) -> list[int]:
    """Return the longest row, and the longest other row, if possible one of the same prompt."""
    lengths = batch.lengths
    prefixes = batch.prefixes
    rows = range(len(batch))
    first = max(rows, key=lengths.__getitem__)
    second = max(rows, key=lambda i: (i != first, prefixes[i] == prefixes[first], lengths[i]))
    return sorted({first, second})
