"""Log-probabilities of completions: the one place that decides what layout a model sees."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..ops.logit_statistics import LogitStatistic
from ..ops.logprobs import token_scores
from ..types import Rows, TokenScores
from .last_layer import skip_unread
from .layout_check import Comparison, LayoutCheck, Results, coarsest
from .lm_head import HeadFinder, OutputHead
from .packed_attention import KEYWORD
from .packed_layout import (
    Layout,
    packed_layout,
    plain_layout,
    run_behind,
    run_passes,
    wants_passes,
)
from .packed_places import Layers
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


@dataclass(frozen=True)
class Hidden:
    """Last hidden states of the tokens of a layout."""

    layout: Layout
    capture: Capture
    logits: Tensor | None = None  # (B, c, V) of the last c tokens of plain rows, without a head

    def at(self, places: Tensor) -> Tensor:
        """States (n, H) of tokens (n,)."""
        if self.capture.hidden is None:
            raise RuntimeError("The decoder of the model returned no hidden states to read.")
        width = self.layout.inputs["input_ids"].shape[1]
        return self.capture.hidden[:, -width:].flatten(0, 1)[places]  # without virtual tokens


class Reader:
    """Turns hidden states into what it is asked for; one forward serves several readers."""

    what = ""  # is read first, in plural
    has_unit = True  # False: differences of two readings are compared by the size of these
    at_end = False  # whether the last token of each row is read, which predicts nothing

    @property
    def can_pack(self) -> bool:
        """Whether rows may share one copy of their prompt; not for a model's own logits."""
        return getattr(self, "head", True) is not None

    def __call__(self, hidden: Hidden) -> tuple[Tensor | None, ...]:
        """What was read, in the shape of the rows: (B, C) or (B,)."""
        raise NotImplementedError


@dataclass(frozen=True)
class TokenReader(Reader):
    """Log-probabilities (B, C) of completion tokens, 0 beyond their end, and what else is asked."""

    head: OutputHead | None  # None: the model's own logits are read, which takes plain rows
    temperature: float = 1.0  # of those logits; a head knows its own
    with_entropy: bool = False  # of each next-token distribution, and if the token is the likeliest
    statistic: LogitStatistic | None = None  # also this statistic of each distribution
    what = "log-probabilities"

    def __call__(self, hidden: Hidden) -> tuple[Tensor | None, ...]:
        """Read (log-probabilities, entropies, hits, statistic)."""
        layout = hidden.layout
        if self.head is None:
            logits = torch.as_tensor(hidden.logits)
            predictions: Sequence[Tensor | None] = [*self._of_logits(logits, layout)]
        else:
            predictions = self.head.scores(
                hidden.at(layout.sources),
                layout.targets,
                hidden.capture.autocast,
                self.with_entropy,
                self.statistic,
            )
        return tuple(None if values is None else layout.scatter(values) for values in predictions)

    def scores(
        self, results: Sequence[Any], values: Tensor | None = None, aux_loss: Tensor | None = None
    ) -> TokenScores:
        """Name what a call returned; with values (B, C) and a load-balancing loss () if known."""
        logps, entropies, hits, statistic = results
        named = {} if self.statistic is None else {self.statistic.name: statistic}
        return TokenScores(
            logps=logps, entropies=entropies, hits=hits, values=values, aux_loss=aux_loss, **named
        )

    def _of_logits(self, logits: Tensor, layout: Layout) -> Iterator[Tensor | None]:
        """Predictions (M,) of plain rows, from logits of their last tokens."""
        ids, logits = layout.inputs["input_ids"], logits[:, -layout.last :]
        width, first = ids.shape[1], ids.shape[1] - logits.shape[1]
        row, column = layout.sources // width, layout.sources % width - first
        targets = ids[:, first:].roll(-1, 1)  # the last token of a row predicts nothing
        extra = None
        if self.statistic is not None:  # a row's logits in float32 at a time
            rows = zip(logits.detach(), targets, strict=True)
            compute = self.statistic.compute
            extra = torch.stack([compute(x.float() / self.temperature, ids) for x, ids in rows])
        scores = token_scores(logits, targets, self.temperature, self.with_entropy)
        for values in (*scores, extra):
            yield None if values is None else values[row, column]


@dataclass(eq=False, kw_only=True)
class Scorer:
    """Scores completions with one copy of each prompt and a tile of logits at a time.

    Models that cannot share a prompt score padded rows, and models whose logits cannot be
    reproduced from their hidden states hold the logits of the completions; a warning says so.
    """

    pad_id: int  # fills the padding of plain rows; masked, so its value does not matter
    temperature: float  # divides the logits, as it did when the tokens were sampled
    device: torch.device  # where the model lives
    pad_multiple: int | None = None  # the width of plain rows becomes a multiple of this
    # Ask a mixture of experts for its load-balancing loss, which counts every row's own prompt;
    # rows are then plain.
    router_logits: bool = False
    shared_prefix: bool = True  # False: plain rows
    chunk: int | None = None  # logits held at once. None: a measured default; 0: all
    # Add gradients of embedding and head to `.grad` as they arise; not for `torch.autograd.grad`.
    in_place: bool = True

    def __post_init__(self) -> None:
        self.heads = HeadFinder(self.temperature, self.chunk, self.in_place)
        self.check = LayoutCheck(self.shared_prefix and not self.router_logits)
        self.context: ContextParallel | None = None  # ranks that divide the tokens of a row
        self._kept: weakref.WeakSet[Layers] = weakref.WeakSet()

    def __call__(
        self,
        model: nn.Module,
        batch: Rows,
        with_entropy: bool = False,
        statistic: LogitStatistic | None = None,
        value_reader: Reader | None = None,
    ) -> TokenScores:
        """Score every completion token of `batch` under `model`, wrapped or not: (B, C) tensors.

        If asked, also by the entropy of each next-token distribution, and whether the token is the
        likeliest; by a statistic of its logits; by the values that `value_reader` reads. All are 0
        beyond a completion's end and where nothing predicts.
        """
        reader = self.token_reader(model, with_entropy, statistic)
        if value_reader is None:
            (results,), aux_loss = self.read(model, batch, [reader])
            return reader.scores(results, aux_loss=aux_loss)
        (results, (values,)), aux_loss = self.read(model, batch, [reader, value_reader])
        return reader.scores(results, values, aux_loss)

    def with_others(
        self, model: nn.Module, batch: Rows, others: Rows, *options: Any
    ) -> tuple[TokenScores, Tensor]:
        """Score rows and, without gradient, others (B, C') of the same prompts, computed once."""
        reader = self.token_reader(model, *options)
        needs_own_forward = is_sharded(model) or self.context or recurrent_layers(model)
        if needs_own_forward or not self.packs(model, batch, [reader]):
            logps = self.logps(model, others)
            return self(model, batch, *options), logps
        (results, other_results), _ = self.read(model, batch, [reader], others)
        return reader.scores(results), torch.as_tensor(other_results[0])

    def token_reader(
        self, model: nn.Module, with_entropy: bool = False, statistic: LogitStatistic | None = None
    ) -> TokenReader:
        """What reads log-probabilities off hidden states of `model`; arguments as for a call."""
        return TokenReader(self.heads.find(model), self.temperature, with_entropy, statistic)

    def read(
        self, model: nn.Module, batch: Rows, readers: Sequence[Reader], others: Rows | None = None
    ) -> tuple[list[tuple[Tensor | None, ...]], Tensor | None]:
        """Let several readers read the hidden states of one forward of a decoder with any head.

        Behind the prompts of `batch`, which must be packed then, the first one also reads `others`,
        without gradient. Returned is what each of them found, in others last, and the
        load-balancing loss () if it is wanted.
        """
        layout, sharded = self._layout(model, batch, readers), is_sharded(model)
        if others is not None:
            layout.inputs[KEYWORD] = replace(layout.inputs[KEYWORD], kept=Layers())

        def work(forward: Forward, inputs: dict[str, Any]) -> tuple[Any, Tensor | None]:
            run = self._decoder(model, forward, layout, readers)
            hidden, aux_loss = self._states(model, layout, run, inputs, others is None)
            found = [reader(hidden) for reader in readers]
            if others is not None:
                with torch.no_grad():
                    behind = packed_layout(others, self.device, shares_more=False)
                    states = run_behind(model, behind, layout, hidden.capture)
                    layout.inputs[KEYWORD].kept.close()
                    found.append(readers[0](Hidden(behind, states)))
            return found, aux_loss

        with embeddings_in_place(model, self.in_place and not sharded):
            # What hooks of wrappers must see of the graph is what comes out here.
            found, aux_loss = run_inside(model, layout.inputs | {"use_cache": False}, work)
        if sharded and not torch.is_grad_enabled():
            release(model)
        return found, aux_loss

    def _decoder(
        self, model: nn.Module, forward: Forward, layout: Layout, readers: Sequence[Reader]
    ) -> Forward:
        """What to call for hidden states; where there is a choice, without calling the head."""
        heads: list[Any] = [x.head for x in readers if isinstance(x, TokenReader)]
        if None in heads:
            return partial(forward, logits_to_keep=layout.last)
        if not self.router_logits and all(head.sharded for head in heads):
            return causal_model(model).base_model
        none = torch.empty(0, dtype=torch.long, device=self.device)
        return partial(forward, logits_to_keep=none if heads[0].is_plain else 1)

    def _states(
        self, model: nn.Module, layout: Layout, run: Forward, inputs: Any, in_passes: bool
    ) -> tuple[Hidden, Tensor | None]:
        """Last hidden states, in passes if they may be and save memory; the loss if wanted."""
        output = None
        # In passes, ranks would gather weights at different times.
        if in_passes and not is_sharded(model) and wants_passes(model, layout):
            self._kept.add(kept := Layers())
            capture = run_passes(model, layout, partial(run, use_cache=False), kept)
        else:
            inputs = inputs | {"output_router_logits": self.router_logits or None}
            with capture_hidden(model) as capture:
                output = run(**{name: value for name, value in inputs.items() if value is not None})
        hidden = Hidden(layout, capture, getattr(output, "logits", None))
        return hidden, getattr(output, "aux_loss", None) if self.router_logits else None

    def _layout(self, model: nn.Module, batch: Rows, readers: Sequence[Reader]) -> Layout:
        if self.packs(model, batch, readers):
            layout = packed_layout(batch, self.device, any(reader.at_end for reader in readers))
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
        """Whether rows are scored with one copy of their prompt; see `LayoutCheck.allows`."""
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
        """Let ranks decide together how `batch` is read; see `LayoutCheck.allows`."""
        self.check.has_agreed = True
        self.packs(model, batch, [reader or self.token_reader(model)], largest)

    def forget(self) -> None:
        """Let go of forwards whose backward failed: they and what they kept hold each other."""
        for kept in self._kept:
            kept.close()
        self._kept.clear()


# --- Rows that are read in two layouts, and compared ---


def scoring_comparison(model: nn.Module, reader: Reader, batch: Rows, pad_id: int) -> Comparison:
    """Compare what a reader finds first in the two longest rows, which share a prompt if any do."""
    length = max(batch.lengths, default=0)
    device = next(model.parameters()).device

    def compute(autocast: torch.dtype | None) -> Results:
        two = batch.select(two_longest(batch))
        plain = read_plain_rows(model, reader, two, pad_id, autocast)
        layout = packed_layout(two, device, reader.at_end)
        packed, dtype = _read(model, reader, layout, autocast)
        if reader.has_unit or not plain.numel():
            return packed, plain, dtype
        size = plain.abs().amax().clamp(min=torch.finfo(plain.dtype).tiny)
        return packed / size, plain / size, dtype

    # Sharded weights are put together by wrappers, which bring their autocast with them.
    def autocast() -> torch.dtype | None:
        return None if is_sharded(model) else autocast_of(model)

    return Comparison(reader.what, length, length, autocast, compute)


@torch.no_grad()
def _read(
    model: nn.Module, reader: Reader, layout: Layout, autocast: torch.dtype | None
) -> tuple[Tensor, torch.dtype]:
    """Read a layout by the decoder itself, without dropout: what was found first, its precision."""
    causal = causal_model(model)

    def work(*_: Any) -> tuple[Tensor, Tensor]:
        states = causal.base_model(**layout.inputs, use_cache=False)[0]
        found = reader(Hidden(layout, Capture(states, autocast)))[0]
        return torch.as_tensor(found), states

    outer = model if is_sharded(model) else causal  # wrappers put sharded weights together
    with evaluating(outer), autocast_to(layout.sources.device, autocast):
        found, states = run_inside(outer, layout.inputs, work)
    return found, coarsest(states.dtype, working_precision(causal), autocast)


def read_plain_rows(
    model: nn.Module, reader: Reader, batch: Rows, pad_id: int, autocast: torch.dtype | None
) -> Tensor:
    """Read rows alone, which takes no padding, no mask and little memory: (B, C) or (B,)."""
    device = next(model.parameters()).device
    alone = [batch.select([row]) for row in range(len(batch))]
    # With sharded weights they are read at once, for every rank to do the same.
    layouts = [plain_layout(x, pad_id, device) for x in ([batch] if is_sharded(model) else alone)]
    found = [row for layout in layouts for row in _read(model, reader, layout, autocast)[0]]
    return torch.stack(found) if reader.at_end else pad_sequence(found, batch_first=True)


def two_longest(batch: Rows) -> list[int]:
    """The longest row, and its longest sibling or else any other row, in the order of the batch."""
    lengths, prefixes = batch.lengths, batch.prefixes
    rows = range(len(batch))
    first = max(rows, key=lengths.__getitem__)
    second = max(rows, key=lambda i: (i != first, prefixes[i] == prefixes[first], lengths[i]))
    return sorted({first, second})
