"""Options of KTO."""

from dataclasses import dataclass
from typing import Any

from ..algorithms.kto import KTO
from ..options import option
from .offline.offline_config import PreferenceConfig


@dataclass
class KTOConfig(PreferenceConfig):
    """Configuration of `KTOTrainer`."""

    loss_type: str = option(
        "kto",
        "kto compares log-ratios with an estimate of the KL divergence; apo_zero_unpaired with 0.",
        choices=("kto", "apo_zero_unpaired"),
    )
    desirable_weight: float = option(1.0, "Weight of the losses of desirable answers.", ge=0)
    undesirable_weight: float = option(1.0, "Weight of the losses of undesirable answers.", ge=0)

    @property
    def estimates_kl(self) -> bool:
        """Whether answers are compared with an estimate of the KL divergence."""
        return self.loss_type == "kto"

    def _problems(self) -> dict[str, Any]:
        return super()._problems() | {
            "desirable_weight=0 and undesirable_weight=0 train nothing: set one of them above 0": (
                not self.desirable_weight and not self.undesirable_weight
            ),
        }

    def make_algorithm(self) -> KTO:
        """Make KTO of these options."""
        return KTO(
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
            estimates_kl=self.estimates_kl,
        )
