"""Whether a model may score or generate with one copy of a prompt, and the proof that it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..ops.oom import is_out_of_memory
from ..types import Rollout
from .autocast import autocast_of, autocast_to, coarsest, precisions_to_try
from .kernel_proof import Heads, noted_heads, prove_kernels
from .lm_head import OutputHead, causal_model, evaluating, run_inside
from .packed_attention import install
from .packed_layout import Layout, packed_layout, plain_layout
from .quantized import working_precision
from .sharded import is_sharded

logger = logging.get_logger(__name__)

FULL_ATTENTION = ("full_attention", "attention")
WINDOWED = ("sliding_attention", "chunked_attention")
LENGTH_DEPENDENT = ("longrope", "dynamic")
# Largest difference of log-probabilities, in nats, that rounding explains; measured on models of
# 135M parameters and on random ones, with a margin of ten.
TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3}
HALF_PRECISION_TOLERANCE = 0.1  # of the mean difference
ELSEWHERE = "it did not pass a trial on another rank"


def why_not_shared(model: nn.Module, longest: int, device: str | None = None) -> str | None:
    """Say what about a model rules the shared prefix out; None if nothing does.

    Args:
        model: a causal language model, wrapped or not.
        longest (`int`): tokens of the longest row.
        device (`str`, *optional*): type of the device that will compute. None: where it is now.
    """
    causal = causal_model(model)
    config = causal.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or FULL_ATTENTION)
    window = _window(config, layers)
    border = _rotary_border(config)
    dropout = any(getattr(module, "attention_dropout", 0.0) for module in causal.modules())
    device = device or next(causal.parameters()).device.type
    findings = {
        f"its attention implementation is {config._attn_implementation!r}, not 'sdpa'": (
            config._attn_implementation != "sdpa"
        ),
        "its attention cannot be replaced": not causal._supports_attention_backend,
        "it is an encoder-decoder": causal.config.is_encoder_decoder,
        "it reads images": hasattr(causal.config, "vision_config"),
        "it keeps a recurrent state": bool(layers - {*FULL_ATTENTION, *WINDOWED}),
        "its attention is soft-capped": bool(getattr(config, "attn_logit_softcapping", None)),
        f"its attention window of {window} tokens is shorter than some rows": bool(
            window and window < longest
        ),
        f"its rotary embedding depends on the longest row from {border} tokens on": (
            border is not None and longest >= border
        ),
        "its attention has dropout": bool(dropout) and model.training,
        "its adapter adds virtual tokens": _has_virtual_tokens(model),
        f"devices of type {device} have no kernel for it": device not in ("cpu", "cuda"),
    }
    return next((words for words, holds in findings.items() if holds), None)


def _window(config: Any, layers: set[str]) -> int | None:
    """Tokens that a layer looks back at most, if some layer is so limited."""
    # Models without `layer_types` apply their window everywhere, unless told not to.
    everywhere = not hasattr(config, "layer_types") and getattr(config, "use_sliding_window", True)
    if not (layers & set(WINDOWED) or everywhere):
        return None
    names = ("sliding_window", "attention_chunk_size")
    return next((getattr(config, name) for name in names if getattr(config, name, None)), None)


def _rotary_border(config: Any) -> int | None:
    """Tokens from which on rotary frequencies depend on what else is in a forward pass."""
    given = getattr(config, "rope_parameters", None) or {}
    kinds = [given] if "rope_type" in given else [x for x in given.values() if isinstance(x, dict)]
    borders = [
        kind.get("original_max_position_embeddings") or config.max_position_embeddings
        for kind in kinds
        if kind.get("rope_type") in LENGTH_DEPENDENT
    ]
    return min(borders, default=None)


def _has_virtual_tokens(model: nn.Module) -> bool:
    configs = getattr(model, "peft_config", None) or {}
    return any(getattr(config, "is_prompt_learning", False) for config in configs.values())


class Sharing:
    """Decides between the shared and the plain way; what does not agree is switched off.

    Args:
        enabled (`bool`): False always takes the plain way.
        pad_id (`int`), device (`torch.device`): for the plain layout that is compared with.
    """

    def __init__(self, enabled: bool, pad_id: int, device: torch.device):
        self.enabled = enabled
        self._pad_id = pad_id
        self._device = device
        self._checked_length = 0
        self.has_agreed = False  # whether ranks decide together
        self._said: set[str] = set()

    def allows(self, model: nn.Module, batch: Rollout, head: OutputHead | None) -> bool:
        """Whether the rows of `batch` may share their prompts.

        At the first use, and whenever rows are twice as long as what was checked, two rows are
        scored both ways and must agree, under the autocast of training as well. Ranks that decide
        together do that in `agree` alone.
        """
        if not self.enabled:
            return False
        longest = longest_row(batch)
        reason = self._objection(model, longest, head)
        if self.has_agreed or (head is not None and head.sharded):
            return reason is None and longest <= 2 * self._checked_length
        if reason is None and head is not None and longest > 2 * self._checked_length:
            reason = self._judge(self._check(model, batch, head))
            self._checked_length = longest
        if reason is not None:
            self.say(model, reason)
        return reason is None

    def agree(
        self,
        model: nn.Module,
        batch: Rollout,
        head: OutputHead | None,
        largest: Callable[[float], float],
    ) -> None:
        """Decide together with the other ranks, which must call this as well.

        From then on only rows up to twice the length of those that some rank has shown to this
        method share their prompts.

        Args:
            batch (`Rollout`): rows of this rank.
            largest: the largest of the values that the ranks give it.
        """
        self.has_agreed = True
        if not self.enabled:
            return
        longest = int(largest(longest_row(batch)))
        reason = self._objection(model, longest, head)
        if reason is None and head is not None and longest > 2 * self._checked_length:
            difference, words = self._check(model, batch, head)
            worst = largest(difference)
            reason = self._judge((worst, words if worst == difference else ELSEWHERE))
            self._checked_length = longest
        if reason is not None:
            self.say(model, reason)

    def _objection(self, model: nn.Module, longest: int, head: OutputHead | None) -> str | None:
        if head is None:
            return "its output projection is unusual"
        return why_not_shared(model, longest)

    def refuse(self, model: nn.Module, reason: str) -> None:
        """Switch sharing off for good, saying why."""
        self.enabled = False
        self.say(model, reason)

    def say(self, model: nn.Module, reason: str) -> None:
        """Warn once for each reason."""
        if reason not in self._said:
            self._said.add(reason)
            name = type(causal_model(model)).__name__
            logger.warning(
                f"shared_prefix: each completion of {name} carries its own copy of the prompt, "
                f"because {reason}. Results are the same, memory and time are not."
            )

    def _check(self, model: nn.Module, batch: Rollout, head: OutputHead) -> tuple[float, str]:
        """The difference in a trial, 0 if rounding explains it, and words about it."""
        two = batch.select(two_longest(batch))
        try:
            # Sharded weights are put together by wrappers, which bring their autocast with them.
            autocast = None if is_sharded(model) else autocast_of(model)
            for precision in precisions_to_try(model, autocast):
                difference = self._difference(model, two, head, precision)
                if difference is not None:
                    words = f"log-probabilities differed by {difference:.2g} nats in a trial"
                    return difference, words
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            return float("inf"), f"the trial failed ({error})"
        return 0.0, ""

    def _difference(
        self, model: nn.Module, two: Rollout, head: OutputHead, autocast: torch.dtype | None
    ) -> float | None:
        with noted_attention(model) as layers:
            plain = plain_log_probs(model, head, two, self._pad_id, autocast)
        prove_kernels(self._device, layers)
        shared, dtype = _scored(model, head, packed_layout(two, self._device), autocast)
        return disagreement(plain, shared, dtype)

    def _judge(self, finding: tuple[float, str]) -> str | None:
        """Switch sharing off after a bad trial, and return why."""
        difference, words = finding
        if difference == 0.0:
            return None
        self.enabled = False
        return words


def disagreement(first: Tensor, second: Tensor, dtype: torch.dtype) -> float | None:
    """The difference in nats if it is more than rounding in `dtype` explains, else None."""
    difference = (first - second).abs()
    if not difference.numel():
        return None
    if dtype in TOLERANCES:
        found, bound = float(difference.max()), TOLERANCES[dtype]
    else:
        found, bound = float(difference.mean()), HALF_PRECISION_TOLERANCE
    return None if found <= bound else found


def noted_attention(model: nn.Module) -> AbstractContextManager[set[Heads]]:
    """Let the attention of a model understand layouts, and note what it is called with."""
    implementation = causal_model(model).config.get_text_config()._attn_implementation
    install(implementation)
    return noted_heads(implementation)


@torch.no_grad()
def _scored(
    model: nn.Module, head: OutputHead, layout: Layout, autocast: torch.dtype | None = None
) -> tuple[Tensor, torch.dtype]:
    """Score a layout by the decoder itself, without dropout: (B, C).

    Wrappers take part only if they have to, to put sharded weights together.

    Returns:
        Log-probabilities, and the precision they were computed in.
    """
    causal = causal_model(model)

    def work(*ignored: Any) -> tuple[Tensor, Tensor]:
        hidden = causal.base_model(**layout.inputs, use_cache=False)[0]
        logps, _ = head.log_probs(hidden.flatten(0, 1)[layout.sources], layout.targets, autocast)
        return logps, hidden

    outer = model if is_sharded(model) else causal
    with evaluating(outer), autocast_to(layout.sources.device, autocast):
        logps, hidden = run_inside(outer, layout.inputs, work)
    return layout.scatter(logps), coarsest(hidden.dtype, working_precision(causal), autocast)


def plain_log_probs(
    model: nn.Module,
    head: OutputHead,
    batch: Rollout,
    pad_id: int,
    autocast: torch.dtype | None = None,
) -> Tensor:
    """Score rows alone, which takes no padding, no mask and little memory: (B, C).

    Rows of sharded weights are padded and scored at once, for every rank to do the same.

    Args:
        autocast (`torch.dtype`, *optional*): its precision; None: switched off.
    """
    device = next(model.parameters()).device
    if is_sharded(model):
        return _scored(model, head, plain_layout(batch, pad_id, device), autocast)[0]
    found = torch.zeros(batch.loss_mask.shape, device=device)
    for row in range(len(batch)):
        layout = plain_layout(batch.select([row]), pad_id, device)
        logps, _ = _scored(model, head, layout, autocast)
        found[row, : logps.shape[1]] = logps[0]
    return found


def longest_row(batch: Rollout) -> int:
    """Tokens of the longest prompt with its completion."""
    return max(map(_row_length, batch.prompt_ids, batch.completion_ids))


def two_longest(batch: Rollout) -> list[int]:
    """The longest row, and if there is one its longest sibling, in the order of the batch."""
    lengths = list(map(_row_length, batch.prompt_ids, batch.completion_ids))
    first = max(range(len(batch)), key=lengths.__getitem__)
    siblings = [
        i
        for i in range(len(batch))
        if i != first and batch.prompt_ids[i] == batch.prompt_ids[first]
    ]
    second = sorted(siblings, key=lengths.__getitem__)[-1:]
    return sorted([first, *second])


def _row_length(prompt: Sequence[int], completion: Sequence[int]) -> int:
    return len(prompt) + len(completion)
