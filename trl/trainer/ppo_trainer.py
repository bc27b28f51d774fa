"""PPO: each token is credited with what turned out better than a value model expected."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..models import value_model as value_models
from ..models.loading import disable_dropout_in_model, load_policy
from ..models.scorer import Reader
from ..ops.advantages import clipped_value_loss, generalized_advantages, token_rewards, whitened
from ..ops.kl import k1, k3
from ..ops.masking import masked_sum, nan_mean
from ..ops.policy_losses import clip_flags, log_ratio, sum_over
from ..types import RewardTable, Rollout, TokenScores
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
    skips_zero_advantages = False  # the value loss is not a multiple of the advantage
    legacy_options = RLOO_AND_PPO_LEGACY_ARGUMENTS | {"ref_policy": "ref_model"}
    method = Method("PPO", "ppo", arxiv="1909.08593")

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: Any = None,
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
        self._moved: list[Tensor] = []  # squared log-ratios of an update, and how many
        self.runner.reset_hooks.append(self._moved.clear)
        self._episodes = 0  # completions of all ranks so far
        count = partial(setattr, self, "_episodes")
        self.rank_state.register("episodes", lambda: self._episodes, count)

    def value_reader(self, model: nn.Module) -> Reader:
        """The value model."""
        return value_models.value_reader(model)

    @property
    def needs_entropy(self) -> bool:
        """For the bonus."""
        return self.args.entropy_coef != 0.0

    def shape_rewards(self, table: RewardTable, batch: Rollout) -> Tensor:
        """Subtract the penalty of completions that were cut off: (N,)."""
        rewards = table.with_truncation_penalty(self.args.missing_eos_penalty)
        store = self.metrics[batch.mode]
        if batch.mode == "train":
            self._episodes += len(rewards)
            store.maximum("episode", self._episodes)
        store.value("objective/scores", nan_mean(rewards))
        store.value("val/num_eos_tokens", torch.as_tensor(table.ended).float().sum())
        return rewards

    def compute_advantages(self, rewards: Tensor, table: RewardTable, batch: Rollout) -> Tensor:
        """Credit tokens by generalized advantage estimation: (B, C), 0 for unscorable rows."""
        args, mask = self.args, batch.loss_mask
        penalty = torch.zeros_like(torch.as_tensor(batch.values))
        if args.beta != 0.0:
            estimate = k1 if args.kl_estimator == "k1" else k3
            penalty = -args.beta * estimate(batch.old_logps, batch.ref_logps, mask)
        store, penalties = self.metrics[batch.mode], penalty.sum(1)
        rewards = torch.as_tensor(batch.rewards)
        entropies = -masked_sum(torch.as_tensor(batch.old_logps), mask, dim=1)
        store.value("objective/entropy", entropies.mean())
        if args.beta != 0.0:
            store.value("objective/kl", -penalties.mean() / args.beta)
        store.value("objective/non_score_reward", penalties.mean())
        store.value("objective/rlhf_reward", nan_mean(rewards + penalties))
        found = token_rewards(rewards, penalty, mask)
        counted = self._scored(batch)
        if args.whiten_rewards:
            found = whitened(found, counted, self.ranks.sum, keeps_mean=True)
        return generalized_advantages(found, batch.values, counted, args.gamma, args.lam)

    def finish(self, batch: Rollout, advantages: Tensor, healthy: bool) -> Rollout:
        """Keep what values should be, and scale the advantages over the round of all ranks."""
        batch = super().finish(batch, advantages, healthy)
        advantages = torch.as_tensor(batch.advantages)
        scaled = whitened(advantages, self._scored(batch), self.ranks.sum)
        return batch.replace(returns=advantages + batch.values, advantages=scaled)

    def _scored(self, batch: Rollout) -> Tensor:
        return batch.loss_mask & ~torch.as_tensor(batch.rewards).isnan()[:, None]

    def policy_loss(self, scores: TokenScores, ratio: Tensor, batch: Rollout) -> Tensor:
        """Return the clipped losses of policy and values, means over tokens of the round."""
        args, mask, store = self.args, self._scored(batch), self.metrics[batch.mode]
        total = self.per_micro_batch(batch.num_loss_tokens, batch)
        losses = self.clipped_losses(ratio, batch, mask)
        off = clipped_value_loss(scores.values, batch.values, batch.returns, args.cliprange_value)
        policy, values = sum_over(losses, mask, total), sum_over(off, mask, total)
        self._record_update(scores, ratio, batch)
        store.value("loss/policy_avg", policy)
        store.value("loss/value_avg", values)
        loss = policy + args.vf_coef * values
        if self.needs_entropy:
            loss = loss - args.entropy_coef * sum_over(scores.entropies, mask, total)
        return loss

    @torch.no_grad()
    def _record_update(self, scores: TokenScores, ratio: Tensor, batch: Rollout) -> None:
        args, mask, store = self.args, self._scored(batch), self.metrics[batch.mode]
        count, values = mask.sum(), torch.as_tensor(scores.values)
        flags = clip_flags(ratio, batch.advantages, *args.clip_range)
        store.mean("policy/clipfrac_avg", masked_sum((flags[0] | flags[1]).float(), mask), count)
        clipped = clipped_value_loss(values, batch.values, batch.returns, args.cliprange_value)
        worse = clipped > 0.5 * (values - batch.returns).square()
        store.mean("val/clipfrac_avg", (worse & mask).sum(), count)
        moved = log_ratio(scores.logps, batch.old_logps, mask, "token")
        squares = torch.stack([0.5 * moved.square().sum(), count])
        store.mean("policy/approxkl_avg", *squares)
        store.mean("val/ratio", masked_sum(ratio, mask), count)
        store.mean("val/ratio_var", masked_sum((ratio - 1).square(), mask), count)
        if scores.entropies is not None:
            store.mean("policy/entropy_avg", masked_sum(scores.entropies, mask), count)
        if batch.mode == "train":
            self._moved.append(squares)

    def check_update(self, step: int) -> None:
        """Drop the round once an update moved the policy too far: the next one generates anew."""
        super().check_update(step)
        if self.args.target_kl is not None and self._moved:
            moved, count = self.ranks.sum(torch.stack(self._moved).sum(0)).tolist()
            stops = moved > self.args.target_kl * count
            self.metrics["train"].value("policy/early_stops", float(stops))
            if stops:
                self.end_epoch()  # of what was generated
        self._moved.clear()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        bare = self.accelerator.unwrap_model(self.model)
        found = bare.state_dict() if state_dict is None else state_dict
        policy, values = value_models.split_state(found)
        super()._save(output_dir, policy)
        if values and self.args.should_save:
            value_models.save_values(bare, values, output_dir or self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_fsdp_enabled:  # its files hold all weights
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        with value_models.without_values(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        value_models.load_values(self.model, resume_from_checkpoint)
