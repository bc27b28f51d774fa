"""Online DPO: two completions of each prompt, one of which is preferred."""

from typing import Any

import torch
from torch import Tensor, nn

from ..online.metrics import record_pairs
from ..online.reward_sources import JudgeReward, PairwiseJudge
from ..ops.masking import masked_sum, nan_mean
from ..ops.preference_losses import PAIR_LOSSES, PairOptions, PairScores
from ..types import RewardTable, Rollout, TokenScores
from .base.best_metric import SAMPLING, SIDES
from .base.options import ignored
from .model_card import Method
from .online.online_trainer import OnlineTrainer
from .online_dpo_config import OnlineDPOConfig

PAIRS = {
    "beta",
    "objective/entropy",
    "objective/kl",
    "objective/non_score_reward",
    "objective/rlhf_reward",
    "objective/scores",
    "objective/scores_margin",
    "rewards/accuracies",
    "rewards/margins",
    "val/contain_eos_token",
}


class OnlineDPOTrainer(OnlineTrainer):
    """Trains a policy to prefer the better of two completions of its own (arXiv 2402.04792).

    The completion y_w with the higher reward is preferred to y_l; the first one, if they are equal:

        d = log pi(y_w) - log pi_ref(y_w) - (log pi(y_l) - log pi_ref(y_l))
        loss = mean over pairs of  -log sigmoid(beta * d)    or, ipo:  (d - 1 / (2 beta))^2

    Log-probabilities are summed over the tokens of a completion, at the sampling temperature.

    A `judge` says which completion is better, instead of `reward_funcs`; without a `ref_model` the
    reference is the policy as it is now. The rest is as for `OnlineTrainer`.
    """

    config_class = OnlineDPOConfig
    evaluation_metrics = OnlineTrainer.evaluation_metrics | SIDES | SAMPLING | PAIRS
    skips_zero_advantages = False  # metrics are of all pairs
    legacy_options = {
        "reward_model": "reward_funcs",
        "reward_processing_class": "reward_processing_classes",
        **ignored("", "data_collator", "compute_metrics", "preprocess_logits_for_metrics"),
    }
    method = Method("Online DPO", "online-dpo", arxiv="2402.04792")

    def __init__(
        self,
        model: str | nn.Module,
        ref_model: str | nn.Module | None = None,
        reward_funcs: Any = None,
        args: OnlineDPOConfig | None = None,
        *,
        judge: PairwiseJudge | None = None,
        **options: Any,
    ):
        if judge is not None:
            if reward_funcs is not None:
                raise ValueError("Both a judge and reward_funcs were given: leave one of them out.")
            reward_funcs = JudgeReward(judge)
        super().__init__(model, reward_funcs, args, ref_model=ref_model, **options)

    def shape_rewards(self, table: RewardTable, batch: Rollout) -> Tensor:
        """Subtract the penalty of completions that were cut off: (N,)."""
        return table.with_truncation_penalty(self.args.missing_eos_penalty)

    def compute_advantages(self, rewards: Tensor, table: RewardTable, batch: Rollout) -> Tensor:
        """1 for the preferred completion, -1 for the other, 0 if one could not be scored: (N,)."""
        store, pairs = self.metrics[batch.mode], rewards.view(-1, 2)
        difference = pairs[:, 0] - pairs[:, 1]
        store.value("objective/scores", nan_mean(rewards))
        store.value("objective/scores_margin", nan_mean(difference.abs()))
        store.value("val/contain_eos_token", torch.as_tensor(table.ended).float().mean())
        first = torch.where(difference >= 0, 1.0, -1.0).masked_fill(difference.isnan(), 0.0)
        return torch.stack([first, -first], 1).flatten()

    def policy_loss(self, scores: TokenScores, ratio: Tensor, batch: Rollout) -> Tensor:
        """Return the mean over pairs, whose rows are neighbors."""
        mask, beta = batch.loss_mask, self.args.beta_in(self.data_position.epoch)
        credit = torch.as_tensor(batch.advantages).view(-1, 2)
        preferred_first = credit.argsort(dim=1, descending=True, stable=True)
        tokens = torch.stack([scores.logps, scores.logps - batch.ref_logps])
        pairs = masked_sum(tokens, mask, dim=2).view(2, -1, 2)
        logps, log_ratios = pairs.gather(2, preferred_first.expand_as(pairs))
        record_pairs(self.metrics[batch.mode], logps, log_ratios, batch.rewards, beta)
        # A completion counts as one token where losses are of means over tokens.
        once = torch.ones_like(log_ratios[:, 0])
        lengths = {"chosen_lengths": once, "rejected_lengths": once}
        sums = PairScores(chosen=log_ratios[:, 0], rejected=log_ratios[:, 1], **lengths)
        losses = PAIR_LOSSES[self.args.loss_type](sums, PairOptions(beta=beta))
        return (losses * credit[:, 0].abs()).mean() * batch.share_of_micro_batch
