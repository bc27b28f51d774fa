"""REINFORCE++ (arXiv 2501.03262) as an algorithm of your own: what it needs, its credit, its loss.

Each token is credited with the reward, less the KL penalties from it on, scaled over all tokens.
"""

from dataclasses import dataclass

from trl import RLOOConfig
from trl.algorithms.base import Algorithm, Needs, clipped_losses
from trl.ops.advantages import whitened
from trl.ops.kl import k1
from trl.ops.masking import masked_sum
from trl.trainer.model_card import Method
from trl.trainer.online.online_trainer import OnlineTrainer


@dataclass(kw_only=True)
class ReinforcePlusPlus(Algorithm):
    """Clipped ratios of tokens, and credit that is scaled over the rollout batch."""

    beta: float = 0.05
    clip_range: tuple[float, float] = (0.2, 0.2)

    @property
    def needs(self):
        penalizes = self.beta > 0
        return Needs(old_logps=penalizes, ref_logps=penalizes, ratio="token")

    def credit(self, step, metrics):
        batch = step.with_rewards(step.rewards.total).batch
        rewards = batch.columns["rewards"][:, None]  # (B, 1); NaN: no function scored the row
        mask = batch.loss_mask & ~rewards.isnan()
        credit = rewards.expand(mask.shape)
        if self.beta > 0:
            logps, ref_logps = batch.columns["old_logps"], batch.columns["ref_logps"]
            penalties = k1(logps, ref_logps, batch.loss_mask)
            metrics.mean("kl", penalties.sum(), batch.loss_mask.sum())
            credit = credit - self.beta * penalties.flip(1).cumsum(1).flip(1)
        return step.with_batches(
            [batch.with_columns(advantages=whitened(credit, mask, step.ranks.sum))]
        )

    def loss(self, scores, batch, metrics):
        losses = clipped_losses(batch, batch.loss_mask, self.clip_range, metrics)
        return {"policy": (masked_sum(losses, batch.loss_mask), batch.totals.tokens)}


class ReinforcePlusPlusConfig(RLOOConfig):
    """Options of RLOO, of which this algorithm reads `beta`, `epsilon` and `epsilon_high`."""

    least_group = 1

    def make_algorithm(self):
        return ReinforcePlusPlus(beta=self.beta, clip_range=self.clip_range)


class ReinforcePlusPlusTrainer(OnlineTrainer):
    """Trains as `RLOOTrainer` does, with the arguments of `OnlineTrainer`."""

    config_class = ReinforcePlusPlusConfig
    method = Method("REINFORCE++", "reinforce-plus-plus")
