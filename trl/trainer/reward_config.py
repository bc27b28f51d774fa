"""Options of reward models."""

from dataclasses import dataclass
from typing import ClassVar

from ..algorithms.reward import RewardModel
from ..options import option
from .offline.offline_config import OfflineConfig


@dataclass
class RewardConfig(OfflineConfig):
    """Configuration of `RewardTrainer`."""

    trains_reward_model: ClassVar[bool] = True
    piece_on_cpu: ClassVar[int] = 1024  # as in DPO

    learning_rate: float = option(1e-4, "Initial learning rate.", ge=0)
    max_length: int | None = option(1024, "Longer rows are left out. None: no limit.", ge=2)
    disable_dropout: bool = option(True, "Set the probability of every dropout layer to zero.")
    center_rewards_coefficient: float | None = option(
        None, "Weight of the squared sum of both scores of a pair, which keeps scores near 0.", ge=0
    )
    router_aux_loss_coef: float | None = option(
        0.0, "Only 0: classifiers do not return the load-balancing loss.", ge=0, le=0
    )

    def make_algorithm(self) -> RewardModel:
        """Make the algorithm of these options."""
        return RewardModel(center_rewards_coefficient=self.center_rewards_coefficient)
