"""Options for engines that draw with other probabilities than the policy's."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from ...ops.mismatch import MODES, RatioBounds
from ..base.options import option
from .agent_config import AgentConfig

ACTIONS = ("warn", "raise")


@dataclass
class MismatchConfig(AgentConfig):
    """Configuration of the mismatch between engine and trainer, for every online trainer."""

    vllm_importance_sampling_correction: bool = option(
        True, "Weight the loss by the ratio of trainer to engine probabilities."
    )
    vllm_importance_sampling_mode: str = option(
        "sequence_mask",
        "One ratio for each token or completion, cut at the bounds or masked beyond them.",
        choices=MODES,
    )
    vllm_importance_sampling_clip_max: float | None = option(
        3.0, "Upper bound of that ratio.", gt=0, hint="None: no bound"
    )
    vllm_importance_sampling_clip_min: float | None = option(
        None, "Lower bound of that ratio.", ge=0
    )
    vllm_importance_sampling_cap: float | None = option(
        None, "Deprecated: vllm_importance_sampling_clip_max."
    )
    vllm_max_logp_gap: float | None = option(
        None,
        "Most nats by which a token's log-probability may differ from the engine's, on mean.",
        gt=0,
        hint="None: no bound",
    )
    vllm_logp_gap_action: str = option(
        "raise", "What to do when vllm_max_logp_gap is exceeded: stop, or warn.", choices=ACTIONS
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._settle_cap()
        self._check_ratio_bounds()

    @property
    def ratio_bounds(self) -> RatioBounds:
        """How ratios become weights."""
        return RatioBounds(
            self.vllm_importance_sampling_mode,
            self.vllm_importance_sampling_clip_min,
            self.vllm_importance_sampling_clip_max,
        )

    def _settle_cap(self) -> None:
        cap = self.vllm_importance_sampling_cap
        if cap is not None:
            warnings.warn(
                "vllm_importance_sampling_cap is now vllm_importance_sampling_clip_max.",
                FutureWarning,
                stacklevel=7,
            )
            self.vllm_importance_sampling_clip_max = cap
            self.vllm_importance_sampling_cap = None

    def _check_ratio_bounds(self) -> None:
        low = self.vllm_importance_sampling_clip_min
        high = self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"vllm_importance_sampling_clip_min={low} must be below "
                f"vllm_importance_sampling_clip_max={high}."
            )
        truncates = self.vllm_importance_sampling_mode.endswith("_truncate")
        if self.vllm_importance_sampling_correction and truncates and low is high is None:
            raise ValueError(
                "vllm_importance_sampling_mode="
                f"{self.vllm_importance_sampling_mode!r} needs a bound: set "
                "vllm_importance_sampling_clip_max, such as 3.0."
            )
