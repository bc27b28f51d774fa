"""Options of DPO."""

import warnings
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from ..algorithms.dpo import DPO
from ..ops.preference_losses import AOT_LOSSES, PAIR_LOSSES, WITHOUT_DIVERGENCE, PairOptions
from ..options import option
from ..suggestions import did_you_mean
from .offline.offline_config import PreferenceConfig

LOSSES = (*PAIR_LOSSES, "sft")
SMOOTHED = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired")
DIVIDED = ("ipo", "sppo_hard")  # by beta


@dataclass
class DPOConfig(PreferenceConfig):
    """Configuration of `DPOTrainer`."""

    piece_on_cpu: ClassVar[int] = 1024  # one pair of usual length, as more of them peak higher

    loss_type: list[str] | str = option(
        ["sigmoid"],
        "One or several of sigmoid, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard, "
        "aot, aot_unpaired, apo_zero, apo_down, discopop, sigmoid_norm, sft; several are added up.",
    )
    loss_weights: list[float] | None = option(None, "Weight of each loss in loss_type. None: 1.")
    rpo_alpha: float | None = option(
        None, "Weight of the mean negative log-likelihood of chosen answers, added to the losses."
    )
    label_smoothing: float = option(
        0.0, "Probability that a label is wrong, for losses that take it into account.", ge=0, lt=1
    )
    reference_free: bool = option(False, "Treat all answers as equally likely under the reference.")
    f_divergence_type: str = option(
        "reverse_kl",
        "The divergence from the reference that is penalized.",
        choices=("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"),
    )
    f_alpha_divergence_coef: float = option(0.5, "Alpha of alpha_divergence.")
    ld_alpha: float | None = option(
        None, "Weight of tokens beyond the length of the shorter answer. None: 1.", ge=0, le=1
    )
    use_weighting: bool = option(False, "Weight pairs by how likely their answers are (WPO).")
    discopop_tau: float = option(0.05, "Temperature of the discopop loss.", gt=0)

    def __post_init__(self) -> None:
        if isinstance(self.f_divergence_type, Enum):
            self.f_divergence_type = self.f_divergence_type.value
        given: Any = self.loss_type
        names = list(given) if isinstance(given, list | tuple) else [given]
        if "aot_pair" in names:
            warnings.warn("'aot_pair' is now 'aot_unpaired'.", FutureWarning, stacklevel=4)
        self.loss_type = ["aot_unpaired" if name == "aot_pair" else name for name in names]
        self._check_losses(self.loss_type)
        super().__post_init__()

    @property
    def losses(self) -> dict[str, float]:
        """The weight of each loss."""
        weights = self.loss_weights or [1.0] * len(self.loss_type)
        found: dict[str, float] = dict.fromkeys(self.loss_type, 0.0)
        for name, weight in zip(self.loss_type, weights, strict=True):
            found[name] += weight
        if self.rpo_alpha:
            found["sft"] = found.get("sft", 0.0) + self.rpo_alpha
        return found

    @property
    def all_losses_need_beta(self) -> bool:
        return not self.losses.get("sft")

    @property
    def needs_reference(self) -> bool:
        return not self.reference_free

    def make_algorithm(self) -> DPO:
        """Make DPO of these options."""
        return DPO(
            losses=self.losses,
            beta=self.beta,
            options=PairOptions(
                beta=self.beta,
                label_smoothing=self.label_smoothing,
                f_divergence_type=self.f_divergence_type,
                f_alpha_divergence_coef=self.f_alpha_divergence_coef,
                discopop_tau=self.discopop_tau,
            ),
            ld_alpha=self.ld_alpha,
            use_weighting=self.use_weighting,
            has_reference=self.needs_reference,
        )

    def _check_losses(self, names: list[str]) -> None:
        if unknown := [name for name in names if name not in LOSSES]:
            hint = did_you_mean(str(unknown[0]), LOSSES)
            raise ValueError(f"loss_type={unknown[0]!r} must be one of {', '.join(LOSSES)}.{hint}")
        weights = self.loss_weights
        # Weights that are no list are refused later, with the other options.
        if not names or (isinstance(weights, list | tuple) and len(weights) != len(names)):
            raise ValueError(f"loss_type={names} and loss_weights={weights} must be equally long.")

    def _problems(self) -> dict[str, Any]:
        names, smoothing, divergence = set(self.losses), self.label_smoothing, "f_divergence_type"
        plain, divided, ranked = (
            ", ".join(sorted(names & {*group}))
            for group in (WITHOUT_DIVERGENCE, DIVIDED, AOT_LOSSES)
        )
        has_divergence = self.f_divergence_type != "reverse_kl"
        return super()._problems() | {
            f"{divergence}={self.f_divergence_type!r} cannot be used with loss_type={plain}, which "
            "does not use it": plain and has_divergence,
            f"label_smoothing={smoothing} has no effect on loss_type={', '.join(self.losses)}; it "
            f"is for {', '.join(SMOOTHED)}": smoothing and not names & {*SMOOTHED},
            "loss_type=exo_pair needs label_smoothing above 0, such as 0.001": (
                "exo_pair" in names and not smoothing
            ),
            f"loss_type=robust needs label_smoothing below 0.5, not {smoothing}": (
                "robust" in names and smoothing >= 0.5
            ),
            f"loss_type={divided} divides by beta, which must be above 0": divided
            and not self.beta,
            f"use_weighting=True cannot be used with loss_type={ranked}: they do not "
            "compare the answers of one pair": self.use_weighting and ranked,
            "sync_ref_model=True has no reference to move, because of reference_free=True": (
                self.sync_ref_model and self.reference_free
            ),
        }
