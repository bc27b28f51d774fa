"""Online DPO: two completions of each prompt, one of which is preferred."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..algorithms.base import LossTerms
from ..algorithms.online_dpo import OnlineDPO
from ..batch import Batch
from ..online.reward_sources import JudgeReward, PairwiseJudge
from ..types import RewardFunc, TokenScores
from .base.best_metric import SAMPLING, SIDES
from .base.keyword_arguments import ignored
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
    algorithm: OnlineDPO
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
        reward_funcs: RewardFunc | Sequence[RewardFunc] | None = None,
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

    def loss(self, scores: TokenScores, batch: Batch) -> LossTerms:
        """Return the losses of pairs, with the beta of the epoch."""
        beta = self.args.beta_in(self.data_position.epoch)
        return replace(self.algorithm, beta=beta).loss(scores, batch, self.metrics[batch.mode])
