"""RLOO: REINFORCE with the rewards of the sibling completions as baseline."""

from ..types import RewardFunc as RewardFunc
from ..types import RolloutFunc as RolloutFunc
from .base.best_metric import CLIPPING, SAMPLING
from .base.keyword_arguments import ignored
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
    method = Method("RLOO", "rloo", arxiv="2402.14740")
