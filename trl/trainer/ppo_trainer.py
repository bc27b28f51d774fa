"""PPO: each token is credited with what turned out better than a value model expected."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..algorithms.ppo import PPO
from ..models import value_model as value_models
from ..models.loading import disable_dropout_in_model, load_policy
from ..models.scorer import Reader
from ..types import RewardFunc
from .base.best_metric import CLIPPING, SAMPLING
from .legacy_options import RLOO_AND_PPO_LEGACY_ARGUMENTS
from .model_card import Method
from .online.online_trainer import OnlineTrainer
from .ppo_config import PPOConfig

VALUES = {
    "loss/policy_avg",
    "loss/value_avg",
    "objective/entropy",
    "objective/kl",
    "objective/non_score_reward",
    "objective/rlhf_reward",
    "objective/scores",
    "policy/approxkl_avg",
    "policy/clipfrac_avg",
    "policy/entropy_avg",
    "val/clipfrac_avg",
    "val/num_eos_tokens",
    "val/ratio",
    "val/ratio_var",
}


class PPOTrainer(OnlineTrainer):
    """Trains a policy and a value model with clipped losses (PPO, arXiv 1707.06347).

    A token's reward is its KL penalty; the reward of the completion is added to that of its last
    token. With V_t the value before token t, and V after the last token 0:

        r_t = -beta * KL_t + (reward, at the last token)
        A_t = d_t + gamma * lam * A_{t+1},  d_t = r_t + gamma * V_{t+1} - V_t,  R_t = A_t + V_t
        loss = mean over tokens of  max(-A_t rho_t, -A_t clip(rho_t))
               + vf_coef / 2 * max((V - R_t)^2, (clip(V) - R_t)^2) - entropy_coef * H_t

    In the loss, advantages have mean 0 and variance 1 over all tokens of the round.

    `value_model`, by name or loaded, is a sequence classifier with one label, which is trained.
    None: a layer on the hidden states of the policy. The rest is as for `OnlineTrainer`.
    """

    config_class = PPOConfig
    evaluation_metrics = OnlineTrainer.evaluation_metrics | CLIPPING | SAMPLING | VALUES
    algorithm: PPO
    legacy_options = RLOO_AND_PPO_LEGACY_ARGUMENTS | {"ref_policy": "ref_model"}
    method = Method("PPO", "ppo", arxiv="1909.08593")

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: RewardFunc | Sequence[RewardFunc] | None = None,
        args: PPOConfig | None = None,
        *,
        value_model: str | nn.Module | None = None,
        **options: Any,
    ):
        rewards = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        if isinstance(value_model, nn.Module) and any(value_model is given for given in rewards):
            raise ValueError("value_model also gives rewards, which would change: pass a copy.")
        self._given_values = value_model
        super().__init__(model, reward_funcs, args, **options)

    def set_up(self) -> None:
        """Make the value model a part of the policy."""
        args, given = self.args, self._given_values
        if isinstance(given, str):
            load = partial(load_policy, distributed=args.world_size > 1, gives_rewards=True)
            given = load(given, dict(args.model_init_kwargs or {}), args.trust_remote_code)
        if isinstance(given, nn.Module) and args.disable_dropout:
            disable_dropout_in_model(given)
        value_models.add_value_model(self.model, given, args.device)
        self.rank_state.register("episodes", lambda: self.algorithm.episodes, self._count_episodes)

    def _count_episodes(self, count: int) -> None:
        """Go on from a number of completions."""
        self.algorithm.episodes = count

    def value_reader(self, model: nn.Module) -> Reader:
        """The value model."""
        return value_models.value_reader(model)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        bare = self.accelerator.unwrap_model(self.model)
        found = bare.state_dict() if state_dict is None else state_dict
        policy, values = value_models.split_state(found)
        super()._save(output_dir, policy)
        if values and self.args.should_save:
            value_models.save_values(bare, values, output_dir or self.args.output_dir)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if self.is_fsdp_enabled:  # its files hold all weights
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        with value_models.without_values(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        value_models.load_values(self.model, resume_from_checkpoint)
