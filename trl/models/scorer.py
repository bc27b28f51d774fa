"""Log-probabilities of completions: the one place that decides what layout a model sees."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.logprobs import token_log_probs, token_statistics
from ..ops.support import Support
from ..types import Rollout, TokenScores
from .layout_check import Sharing
from .lm_head import (
    Capture,
    HeadFinder,
    OutputHead,
    capture_hidden,
    causal_model,
    evaluating,
    run_inside,
)
from .packed_attention import Layers
from .packed_layout import Layout, packed_layout, plain_layout
from .packed_passes import run_passes, wants_passes
from .sharded import release

Forward = Callable[..., Any]


class Scorer:
    """Scores completions with one copy of each prompt and a tile of logits at a time.

    Models that cannot share a prompt score padded rows, and models whose logits cannot be
    reproduced from their hidden states hold the logits of the completions; both are said once.

    Args:
        pad_id (`int`): fills the padding of plain rows; masked, so its value does not matter.
        temperature (`float`): divides the logits, as it did when the tokens were sampled.
        device (`torch.device`): where the model lives.
        pad_multiple (`int`, *optional*): pad both widths of plain rows to a multiple of this.
        router_logits (`bool`): ask a mixture-of-experts model for its load-balancing loss, which
            counts every row's own prompt; rows are then plain.
        shared_prefix (`bool`): False: plain rows.
        chunk (`int`, *optional*): logits held at once. None: a measured default; 0: all at once.
    """

    def __init__(
        self,
        *,
        pad_id: int,
        temperature: float,
        device: torch.device,
        pad_multiple: int | None = None,
        router_logits: bool = False,
        shared_prefix: bool = True,
        chunk: int | None = None,
    ):
        self.pad_id = pad_id
        self.temperature = temperature
        self.device = device
        self.pad_multiple = pad_multiple
        self.router_logits = router_logits
        self.heads = HeadFinder(temperature, chunk)
        self.sharing = Sharing(shared_prefix and not router_logits, pad_id, device)
        self._kept: list[weakref.ref[Layers]] = []

    def __call__(
        self,
        model: nn.Module,
        batch: Rollout,
        with_entropy: bool = False,
        support: Support | None = None,
    ) -> TokenScores:
        """Score every completion token of `batch` under `model`.

        Args:
            model: a causal language model, wrapped for distributed training or not.
            batch (`Rollout`): B rows; only its token ids are read.
            with_entropy (`bool`): also return the entropy of each next-token distribution.
            support (`Support`, *optional*): also return the mass that these filters leave of it.

        Returns:
            `TokenScores`: (B, C) tensors, 0 beyond a completion's end.
        """
        head = self.heads.find(model)
        layout = self._layout(model, batch, head)
        if head is None:
            return self._from_logits(model, layout, with_entropy, support)

        def work(forward: Forward, inputs: dict[str, Any]) -> tuple[Tensor | None, ...]:
            run = self._decoder(model, forward, head)
            # In passes, ranks would gather weights at different times.
            in_passes = layout.is_packed and not head.sharded and wants_passes(model, layout)
            hidden_of = self._in_passes if in_passes else self._at_once
            capture, output = hidden_of(model, layout, run, inputs)
            width = layout.inputs["input_ids"].shape[1]
            hidden = torch.as_tensor(capture.hidden)[:, -width:]  # without virtual tokens
            hidden = hidden.flatten(0, 1)[layout.sources]
            found = head.scores(hidden, layout.targets, capture.autocast, with_entropy, support)
            return *found, getattr(output, "aux_loss", None) if self.router_logits else None

        # What hooks of wrappers must see of the graph is what comes out here.
        *found, aux_loss = run_inside(model, self._inputs(layout), work)
        if head.sharded and not torch.is_grad_enabled():
            release(model)
        return self._scores(layout, found, aux_loss)

    def _decoder(self, model: nn.Module, forward: Forward, head: OutputHead) -> Forward:
        """What to call for hidden states; where there is a choice, without calling the head."""
        causal = causal_model(model)
        if head.sharded and not self.router_logits:
            return causal.base_model
        none = torch.empty(0, dtype=torch.long, device=self.device) if head.is_plain else 1
        return partial(forward, logits_to_keep=none)

    def _in_passes(
        self, model: nn.Module, layout: Layout, run: Forward, inputs: dict[str, Any]
    ) -> tuple[Capture, None]:
        """Last hidden states in several passes; see `run_passes`."""
        kept = Layers()
        self._kept = [known for known in self._kept if known() is not None]
        self._kept.append(weakref.ref(kept))
        return run_passes(model, layout, partial(run, use_cache=False), kept), None

    def _at_once(
        self, model: nn.Module, layout: Layout, run: Forward, inputs: dict[str, Any]
    ) -> tuple[Capture, Any]:
        """Last hidden states of one forward, and its output."""
        given = {name: value for name, value in inputs.items() if value is not None}
        with capture_hidden(model) as capture:
            output = run(**given)
        return capture, output

    @torch.no_grad()
    def logps(self, model: nn.Module, batch: Rollout) -> Tensor:
        """Score without gradient, in evaluation mode: (B, C)."""
        return self.frozen_scores(model, batch).logps

    @torch.no_grad()
    def frozen_scores(
        self, model: nn.Module, batch: Rollout, support: Support | None = None
    ) -> TokenScores:
        """Score without gradient, in evaluation mode; arguments as for a call."""
        with evaluating(model):
            return self(model, batch, support=support)

    def agree(self, model: nn.Module, batch: Rollout, largest: Callable[[float], float]) -> None:
        """Let ranks decide together about what `batch` needs; see `Sharing.agree`."""
        self.sharing.agree(model, batch, self.heads.find(model), largest)

    @property
    def has_agreed(self) -> bool:
        """Whether ranks have decided together before."""
        return self.sharing.has_agreed

    def forget(self) -> None:
        """Let go of forwards whose backward pass failed: they hold what they kept, and it them."""
        for reference in self._kept:
            kept = reference()
            if kept is not None:
                kept.clear()
        self._kept.clear()

    def _layout(self, model: nn.Module, batch: Rollout, head: OutputHead | None) -> Layout:
        if self.sharing.allows(model, batch, head):
            return packed_layout(batch, self.device)
        return plain_layout(batch, self.pad_id, self.device, self.pad_multiple)

    def _inputs(self, layout: Layout) -> dict[str, Any]:
        options = {"output_router_logits": True} if self.router_logits else {}
        return layout.inputs | {"use_cache": False} | options

    def _from_logits(
        self, model: nn.Module, layout: Layout, with_entropy: bool, support: Support | None
    ) -> TokenScores:
        """Score plain rows by the model's own logits of the completions."""
        rows = len(layout.inputs["input_ids"])
        columns = len(layout.targets) // rows
        output = model(**self._inputs(layout), logits_to_keep=columns + 1)
        aux_loss = output.aux_loss if self.router_logits else None
        logits = output.logits[:, -(columns + 1) : -1]
        targets = layout.targets.view(rows, columns)
        mass = None if support is None else self._log_mass(logits.detach(), targets, support)
        if with_entropy:
            logps, entropies = token_statistics(logits, targets, self.temperature)
            return self._scores(layout, (logps.flatten(), entropies.flatten(), mass), aux_loss)
        logps = token_log_probs(logits, targets, self.temperature)
        return self._scores(layout, (logps.flatten(), None, mass), aux_loss)

    def _log_mass(self, logits: Tensor, targets: Tensor, support: Support) -> Tensor:
        """Mass of the support (B * C,), a row's logits in float32 at a time."""
        rows = zip(logits, targets, strict=True)
        masses = [support.log_mass(row.float() / self.temperature, ids) for row, ids in rows]
        return torch.cat(masses)

    def _scores(
        self, layout: Layout, found: Sequence[Tensor | None], aux_loss: Tensor | None
    ) -> TokenScores:
        logps, entropies, mass = found
        return TokenScores(
            logps=layout.scatter(torch.as_tensor(logps)),
            entropies=None if entropies is None else layout.scatter(entropies),
            log_mass=None if mass is None else layout.scatter(mass),
            aux_loss=aux_loss,
        )
