"""Whether rows may share one copy of their prompt, and the check that results stay the same.

A check computes a few rows in two layouts and compares within what rounding explains, under the
autocast and with the attention kernels that the model trains or generates with. Float32 products
are then as precise as they can be: the rounding of TF32 would hide errors, and look like one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..distributed import RankError
from ..ops.matmul_precision import highest_matmul_precision
from ..ops.oom import is_out_of_memory
from .packed_attention import checked_kernels
from .patches import attention_implementation
from .recurrent import all_forked, recurrent_layers
from .sharded import is_sharded
from .unwrap import causal_model, mentions
from .weights import working_precision

logger = logging.get_logger(__name__)

FULL_ATTENTION = ("full_attention", "attention")
WINDOWED = ("sliding_attention", "chunked_attention")
LENGTH_DEPENDENT = ("longrope", "dynamic")
DROPOUTS = ("attention_dropout", "attn_dropout", "dropout")
# Largest difference of log-probabilities, in nats, that rounding explains; measured on models of
# 135M parameters and on random ones, with a margin of ten.
TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3}
HALF_PRECISION_TOLERANCE = 0.1  # of the mean difference


def why_not_shared(model: nn.Module, longest: int, device: str | None = None) -> str | None:
    """Say what about a model rules out one copy of a prompt; None if nothing does.

    `longest` is in tokens; `device` the type of the one that will compute, if it is not there yet.
    """
    causal = causal_model(model)
    config = causal.config.get_text_config()
    attention = attention_implementation(config)
    keep_states = bool(recurrent_layers(causal))
    kinds = set(getattr(config, "layer_types", None) or ())
    others = set() if keep_states else kinds - {*FULL_ATTENTION, *WINDOWED}
    border = _rotary_border(config)
    # Those that take their attention from a table, where it can be replaced.
    attentions = [m for m in causal.modules() if mentions(m.__class__, "ALL_ATTENTION_FUNCTIONS")]
    device = device or next(causal.parameters()).device.type
    adapters = getattr(model, "peft_config", {}).values()
    virtual = any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters)
    findings = {
        f"its attention implementation is {attention!r}, not 'sdpa'": (
            attention not in ("sdpa", "eager")
        ),
        "its attention cannot be replaced": not attentions,
        "it is an encoder-decoder": causal.config.is_encoder_decoder,
        "it reads images": hasattr(causal.config, "vision_config"),
        f"it has layers of other kinds: {', '.join(sorted(others))}": bool(others),
        "its recurrent layers are sharded": keep_states and is_sharded(model),
        f"its rotary embedding depends on the longest row from {border} tokens on": (
            border is not None and longest >= border
        ),
        "its attention has dropout": model.training and any(map(_drops_weights, attentions)),
        "its adapter adds virtual tokens": virtual,
        f"{device} devices have no attention kernel for it": device not in ("cpu", "cuda"),
    }
    return next((words for words, holds in findings.items() if holds), None)


def windows(model: nn.Module) -> list[int]:
    """Tokens that layers look back at most, as a model's configuration has them."""
    config = causal_model(model).config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds and set(kinds).isdisjoint(WINDOWED):
        return []
    found = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return [size for size in found if isinstance(size, int)]


def _drops_weights(attention: nn.Module) -> bool:
    """Whether weights of attention are dropped, with a probability or by a module that has one."""
    found = (getattr(attention, name, None) for name in DROPOUTS)
    return any(getattr(dropout, "p", dropout) for dropout in found)


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


# The same numbers, packed and plain, and the precision in which they were computed.
Results = tuple[Tensor, Tensor, torch.dtype]


@dataclass(frozen=True)
class Comparison:
    """How a model computes a few rows in both layouts."""

    what: str  # is compared, in plural
    length: int  # tokens of the longest row that is compared
    longest: int  # tokens of the longest row there will be
    autocast: Callable[[], torch.dtype | None]  # finds the precision in which the model is used
    compute: Callable[[torch.dtype | None], Results]  # under a precision of autocast


@dataclass
class LayoutCheck:
    """Decides between one copy of a prompt and plain rows; what does not agree is switched off."""

    enabled: bool  # False: always plain rows
    # Each rank decides for itself also where weights are sharded, because they are whole while it
    # computes, or because all ranks take part in every forward.
    alone: bool = False
    has_agreed: bool = field(default=False, init=False)  # whether ranks decide together
    _checked_length: int = field(default=0, init=False)
    _warned: set[str] = field(default_factory=set, init=False)

    def allows(
        self,
        model: nn.Module,
        comparison: Comparison,
        largest: Callable[[float], float] | None = None,
    ) -> bool:
        """Whether rows may share one copy of their prompt.

        Compares at the first use, and whenever rows are twice as long as what was compared or the
        first to be longer than a window; then it warns once for each reason against it.

        Ranks decide together, as they must where weights are sharded, when all of them call this
        with `largest`, which returns the largest of the values that the ranks give it. From then
        on, only rows up to twice the length of those that some rank has shown that way may.
        """
        if not self.enabled:
            return False
        if largest is None and (self.has_agreed or (not self.alone and is_sharded(model))):
            outgrown = self._has_outgrown(model, comparison.length)
            return not outgrown and why_not_shared(model, comparison.longest) is None
        return self._decide(model, comparison, largest or float)

    def _decide(
        self, model: nn.Module, comparison: Comparison, largest: Callable[[float], float]
    ) -> bool:
        length = int(largest(comparison.length))
        reason = why_not_shared(model, max(length, comparison.longest))
        if reason is None and self._has_outgrown(model, length):
            difference, reason = self._compare(model, comparison)
            self._checked_length = length
            if largest(difference) != 0.0:
                self.enabled = False
                reason = reason or "it failed the check on another rank"
        if reason is not None and reason not in self._warned:
            self._warned.add(reason)
            name = type(causal_model(model)).__name__
            logger.warning(
                f"shared_prefix: each completion of {name} carries its own copy of the prompt, "
                f"because {reason}. Results are the same, memory and time are not."
            )
        return reason is None

    def _has_outgrown(self, model: nn.Module, length: int) -> bool:
        """Whether rows are far longer than what was compared, or the first beyond a window."""
        known = self._checked_length
        return length > 2 * known or any(known <= window < length for window in windows(model))

    def _compare(self, model: nn.Module, comparison: Comparison) -> tuple[float, str | None]:
        """The difference, 0 if rounding explains it, and else what is wrong."""
        try:
            for precision in precisions_to_check(model, comparison.autocast()):
                with highest_matmul_precision(), checked_kernels(model), all_forked(model):
                    found = comparison.compute(precision)
                difference = disagreement(found)
                if difference is not None:
                    return difference, f"{comparison.what} differed by {difference:.2g} in a check"
        # Whatever a model that nobody has seen before may raise: plain rows are always right.
        except Exception as error:
            if isinstance(error, RankError) or is_out_of_memory(error):
                raise
            return float("inf"), f"a check of {comparison.what} failed ({error})"
        return 0.0, None


def precisions_to_check(
    model: nn.Module, autocast: torch.dtype | None
) -> Sequence[torch.dtype | None]:
    """Precisions of autocast for a check: none, where that is finer, and the one that is used."""
    if autocast is None:
        return (None,)
    own = working_precision(causal_model(model))
    # No rounding hides an error in the finer one; the other has the kernels that run.
    return (autocast,) if coarsest(own, autocast) == own else (None, autocast)


def coarsest(*dtypes: torch.dtype | None) -> torch.dtype:
    """The least precise of floating dtypes; None counts for nothing."""
    return max(filter(None, dtypes), key=lambda dtype: torch.finfo(dtype).eps)


def disagreement(found: Results) -> float | None:
    """The difference if it is more than rounding explains, else None."""
    packed, plain, dtype = found
    difference = (packed - plain).abs()
    if not difference.numel():
        return None
    size = float(difference.max() if dtype in TOLERANCES else difference.mean())
    return None if size <= TOLERANCES.get(dtype, HALF_PRECISION_TOLERANCE) else size
