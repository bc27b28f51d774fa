"""Decide whether rows may share one copy of their prompt, and check that results stay the same.

The check computes a few rows in both layouts and compares them up to rounding, under the autocast
and with the attention kernels that the model trains or generates with. TF32 is off during the
check: its rounding would hide errors or look like one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..distributed import RankError
from ..ops.matmul_precision import highest_matmul_precision
from ..ops.oom import is_out_of_memory
from .packed_attention import checked_kernels
from .patches import attention_implementation
from .recurrent import checked_states, recurrent_layers
from .sharded import is_sharded
from .unwrap import causal_model, mentions
from .weights import working_precision

logger = logging.get_logger(__name__)

FULL_ATTENTION = ("full_attention", "attention")
WINDOWED = ("sliding_attention", "chunked_attention")
LENGTH_DEPENDENT = ("longrope", "dynamic")
# Largest difference of log-probabilities, in nats, that rounding explains; measured on models of
# 135M parameters and on random ones, with a margin of ten.
TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3}
HALF_PRECISION_TOLERANCE = 0.1  # of the mean difference


def why_not_shared(model: nn.Module, longest: int, device_type: str | None = None) -> str | None:
    """Return the reason why rows of this model cannot share a prompt; None if they can.

    `longest` is the length of the longest row in tokens. `device_type` is that of the device that
    will compute; by default, that of the model's weights.
    """
    causal = causal_model(model)
    device_type = device_type or next(causal.parameters()).device.type
    implementation = attention_implementation(causal.config.get_text_config())
    if implementation not in ("sdpa", "eager"):
        return f"its attention implementation is {implementation!r}, not 'sdpa'"
    # Modules that look their attention function up in transformers' registry.
    attentions = [m for m in causal.modules() if mentions(m.__class__, "ALL_ATTENTION_FUNCTIONS")]
    if not attentions:
        return "its attention cannot be replaced"
    reason = _unsuitable_architecture(model, causal, longest)
    if reason is not None:
        return reason
    if model.training and any(map(_has_attention_dropout, attentions)):
        return "its attention has dropout"
    if _adds_virtual_tokens(model):
        return "its adapter adds virtual tokens"
    if device_type not in ("cpu", "cuda"):
        return f"{device_type} devices have no attention kernel for it"
    return None


def _unsuitable_architecture(model: nn.Module, causal: PreTrainedModel, longest: int) -> str | None:
    config = causal.config.get_text_config()
    if causal.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if hasattr(causal.config, "vision_config"):
        return "it reads images"
    if recurrent_layers(causal):
        if is_sharded(model):
            return "its recurrent layers are sharded"
    else:
        layer_types = set(getattr(config, "layer_types", None) or ())
        unsupported = layer_types - {*FULL_ATTENTION, *WINDOWED}
        if unsupported:
            return f"it has layers of other kinds: {', '.join(sorted(unsupported))}"
    limit = _rotary_limit(config)
    if limit is not None and longest >= limit:
        return f"its rotary embedding depends on the longest row from {limit} tokens on"
    return None


def _adds_virtual_tokens(model: nn.Module) -> bool:
    adapters = getattr(model, "peft_config", {}).values()
    return any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters)


def windows(model: nn.Module) -> list[int]:
    """Return the sizes of the attention windows in a model's configuration, in tokens."""
    config = causal_model(model).config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types and set(layer_types).isdisjoint(WINDOWED):
        return []
    sizes = (getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None))
    return [size for size in sizes if isinstance(size, int)]


def _has_attention_dropout(attention: nn.Module) -> bool:
    """Whether an attention module has a dropout above 0, as a number or as a module."""
    dropouts = (
        getattr(attention, "attention_dropout", None),
        getattr(attention, "attn_dropout", None),
        getattr(attention, "dropout", None),
    )
    return any(getattr(dropout, "p", dropout) for dropout in dropouts)


def _rotary_limit(config: PretrainedConfig) -> int | None:
    """Return the length from which rotary frequencies depend on the other rows of a forward."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        layer_parameters = [parameters]
    else:  # one dictionary for each type of layers
        layer_parameters = [x for x in parameters.values() if isinstance(x, dict)]
    limits = [
        x.get("original_max_position_embeddings") or config.max_position_embeddings
        for x in layer_parameters
        if x.get("rope_type") in LENGTH_DEPENDENT
    ]
    return min(limits, default=None)


class Results(NamedTuple):
    """The same numbers in both layouts, and the precision in which they were computed."""

    packed: Tensor
    plain: Tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class Comparison:
    """How to compute a few rows in both layouts."""

    quantity: str  # what is compared, as a plural noun for messages
    length: int  # tokens of the longest row that is compared
    longest: int  # tokens of the longest row that will be computed later
    autocast: Callable[[], torch.dtype | None]  # returns the autocast that the model is used under
    compute: Callable[[torch.dtype | None], Results]  # computes the rows under an autocast


@dataclass
class LayoutCheck:
    """Decides between shared prompts and plain rows; a failed check disables sharing for good."""

    enabled: bool  # False: always plain rows
    # Each rank decides for itself even if weights are sharded: either they are gathered while it
    # computes, or all ranks take part in every forward.
    per_rank: bool = False
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

        Compares the layouts at the first use, when rows are more than twice as long as those
        compared before, and when they are longer than an attention window for the first time. Warns
        once for each reason against sharing.

        To decide together, all ranks call this with `largest`, a function that returns the maximum
        of its argument over ranks. They must do so if weights are sharded. From then on, calls
        without `largest` allow only rows up to twice the length compared last, without comparing.
        """
        if not self.enabled:
            return False
        if largest is None and (self.has_agreed or (not self.per_rank and is_sharded(model))):
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
        """Whether rows are far longer than those compared, or the first beyond a window."""
        checked = self._checked_length
        return length > 2 * checked or any(checked <= window < length for window in windows(model))

    def _compare(self, model: nn.Module, comparison: Comparison) -> tuple[float, str | None]:
        """Return (0, None) if the layouts agree, else the difference and a reason not to share."""
        quantity = comparison.quantity
        try:
            for precision in precisions_to_check(model, comparison.autocast()):
                with highest_matmul_precision(), checked_kernels(model), checked_states(model):
                    results = comparison.compute(precision)
                difference = disagreement(results)
                if difference is not None:
                    return difference, f"{quantity} differed by {difference:.2g} in a check"
        # An unknown model may raise anything; plain rows are always right.
        except Exception as error:
            if isinstance(error, RankError) or is_out_of_memory(error):
                raise
            return float("inf"), f"a check of {quantity} failed ({error})"
        return 0.0, None


def precisions_to_check(
    model: nn.Module, autocast: torch.dtype | None
) -> Sequence[torch.dtype | None]:
    """Return the autocast dtypes to check: the one in use, after None (no autocast) if finer."""
    if autocast is None:
        return (None,)
    own = working_precision(causal_model(model))
    # In the finer precision no rounding hides an error; the one in use runs the actual kernels.
    return (autocast,) if coarsest(own, autocast) == own else (None, autocast)


def coarsest(*dtypes: torch.dtype | None) -> torch.dtype:
    """Return the least precise of floating dtypes; None is ignored."""
    return max(filter(None, dtypes), key=lambda dtype: torch.finfo(dtype).eps)


def disagreement(results: Results) -> float | None:
    """Return the difference of the layouts if rounding does not explain it, else None."""
    packed, plain, dtype = results
    difference = (packed - plain).abs()
    if not difference.numel():
        return None
    size = float(difference.max() if dtype in TOLERANCES else difference.mean())
    return None if size <= TOLERANCES.get(dtype, HALF_PRECISION_TOLERANCE) else size
