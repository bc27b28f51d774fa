"""RLOO: REINFORCE with the rewards of the sibling completions as baseline."""

from torch import Tensor

from ..ops.advantages import leave_one_out, whiten
from ..ops.kl import sequence_kl
from ..ops.masking import masked_sum
from ..types import RewardFunc as RewardFunc
from ..types import RewardTable, Rollout, TokenScores
from ..types import RolloutFunc as RolloutFunc
from .base.best_metric import CLIPPING, SAMPLING
from .base.options import ignored
from .legacy_options import RLOO_AND_PPO_LEGACY_ARGUMENTS
from .model_card import Method
from .online.online_trainer import OnlineTrainer
from .rloo_config import RLOOConfig


class RLOOTrainer(OnlineTrainer):
    """Trains a policy with REINFORCE and a leave-one-out baseline (arXiv 2402.14740).

    For a prompt with completions i = 1..G and rewards r_i, the reward is penalized by the
    divergence from the reference policy, and compared with the mean of the other completions:

        R_i = clip(r_i) - beta * sum_t (log pi_old(y_it) - log pi_ref(y_it))
        A_i = R_i - mean_{j != i} R_j
        loss = -mean_i min(rho_i A_i, clip(rho_i, 1 - epsilon, 1 + epsilon_high) A_i)

    with one probability ratio rho_i for the whole completion. It is 1 when the rollout is used
    once before the weights move. The arguments are those of `OnlineTrainer`; those of the first
    RLOO trainer (`config`, `policy`, `reward_model`, ...) are accepted with a `FutureWarning`.
    """

    config_class = RLOOConfig
    evaluation_metrics = OnlineTrainer.evaluation_metrics | CLIPPING | SAMPLING | {"kl"}
    legacy_options = RLOO_AND_PPO_LEGACY_ARGUMENTS | ignored("", "ref_policy")
    ratio_level = "sequence_sum"
    method = Method("RLOO", "rloo", arxiv="2402.14740")

    def shape_rewards(self, table: RewardTable, batch: Rollout) -> Tensor:
        """Clip the task reward and subtract the KL penalty: (N,)."""
        rewards = table.total
        if self.args.reward_clip_range is not None:
            rewards = rewards.clamp(*self.args.reward_clip_range)
        if self.args.beta == 0.0:
            return rewards
        divergence = sequence_kl(batch.old_logps, batch.ref_logps, batch.loss_mask)
        self.metrics[batch.mode].mean("kl", divergence.sum(), batch.loss_mask.sum())
        return rewards - self.args.beta * self.ranks.gather(divergence)

    def compute_advantages(self, rewards: Tensor, table: RewardTable, batch: Rollout) -> Tensor:
        """Compare each completion with the others of its prompt: (N,)."""
        advantages = leave_one_out(rewards, table.group_size)
        if self.args.normalize_advantages:
            advantages = whiten(advantages, ~rewards.isnan())
        return advantages

    def policy_loss(self, scores: TokenScores, ratio: Tensor, batch: Rollout) -> Tensor:
        """Return the clipped surrogate of whole completions, averaged over completions."""
        rows = batch.loss_mask.any(1, keepdim=True)
        losses = self.clipped_losses(ratio, batch, rows)
        return masked_sum(losses, rows) / self.per_micro_batch(batch.num_loss_rows, batch)
