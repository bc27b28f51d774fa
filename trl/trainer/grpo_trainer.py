"""GRPO: advantages relative to the group, and a per-token objective with many variants."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ops import policy_losses as objectives
from ..ops.advantages import group_relative, normalize_then_sum
from ..ops.entropy import entropy_threshold, high_entropy_mask
from ..ops.kl import k3
from ..ops.masking import masked_sum
from ..types import EnvironmentFactory as EnvironmentFactory
from ..types import RewardFunc as RewardFunc
from ..types import RewardTable, Rollout, TokenScores
from ..types import RolloutFunc as RolloutFunc
from .base.best_metric import CLIPPING, SAMPLING
from .grpo_config import GRPOConfig
from .model_card import Method
from .online.online_trainer import OnlineTrainer

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
STATE_FILE = "entropy_ctrl_state.json"


class EntropyController:
    """Raises the coefficient while the entropy is at or below its target, lowers it above."""

    def __init__(self, args: GRPOConfig):
        self.args, self.coefficient = args, args.entropy_coef  # the weight of the bonus
        self.measured: float | None = None  # that of the last update, of all ranks, in nats a token

    @property
    def is_used(self) -> bool:
        """Whether there is, or may come to be, a bonus."""
        return self.args.use_adaptive_entropy or self.coefficient != 0.0

    @property
    def active(self) -> float:
        """Weight of the bonus: 0 if the last measured entropy is above its target, or none was."""
        if not self.args.use_adaptive_entropy:
            return self.coefficient
        below = self.measured is not None and self.measured <= self.args.entropy_target
        return self.coefficient if below else 0.0

    def update(self, entropy: float) -> None:
        """Take the mean over the trained-on tokens of a step into account, if it is finite."""
        step = self.args.entropy_coef_delta * self.args.use_adaptive_entropy
        change = step if entropy <= self.args.entropy_target else -step
        if math.isfinite(entropy):
            self.restore({"coefficient": self.coefficient + change, "measured": entropy})

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {"coefficient": self.coefficient, "measured": self.measured}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned, within the bounds of this controller."""
        self.measured, wanted = state["measured"], state["coefficient"]
        if self.args.use_adaptive_entropy:
            wanted = min(max(wanted, self.args.entropy_coef_min), self.args.entropy_coef_max)
        self.coefficient = wanted


class GRPOTrainer(OnlineTrainer):
    """Trains a policy with group-relative advantages (arXiv 2402.03300) and its descendants.

    A completion's advantage is its reward minus the mean of its prompt's completions, divided by
    their standard deviation unless `scale_rewards` says otherwise. `loss_type` chooses the
    objective of each token and the denominator of its sum:

    | loss_type | objective | denominator |
    | --- | --- | --- |
    | grpo, sapo | clipped ratio; soft gate | tokens of the completion, then completions |
    | dapo, cispo, vespo | clipped ratio; weighted log-probability | tokens of the round |
    | bnpo | clipped ratio | tokens of the micro-batch |
    | dr_grpo | clipped ratio | completions x max_completion_length |
    | luspo | clipped ratio | completions |

    The KL penalty is the k3 estimator in the loss. The arguments are those of `OnlineTrainer`.
    """

    config_class = GRPOConfig
    evaluation_metrics = (
        OnlineTrainer.evaluation_metrics
        | CLIPPING
        | SAMPLING
        | {"cispo_clip_ratio", "kl", "policy_loss", "vespo/phi_seq_mean"}
    )
    method = Method("GRPO", "grpo", arxiv="2402.03300")

    def set_up(self) -> None:
        """Build the controller of the entropy bonus."""
        self.entropy = EntropyController(self.args)
        self._entropy_seen: list[tuple[Tensor, Tensor]] = []
        self.runner.reset_hooks.append(self._entropy_seen.clear)

    def check_update(self, step: int) -> None:
        """Move the entropy coefficient for the next update."""
        super().check_update(step)
        if not (self.entropy.is_used and self._entropy_seen):
            return
        seen = torch.stack([torch.stack(pair) for pair in self._entropy_seen]).sum(0)
        total, count = self.ranks.sum(seen).tolist()
        self._entropy_seen.clear()
        self.metrics["train"].value("entropy_coef", self.entropy.active)
        if count:
            self.entropy.update(total / count)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.entropy.is_used and self.is_world_process_zero():
            Path(output_dir, STATE_FILE).write_text(json.dumps(self.entropy.state()))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        path = Path(checkpoint or "", STATE_FILE)
        found = path.read_text() if checkpoint and path.exists() else None
        if state := self.ranks.gather_objects(found)[0]:
            self.entropy.restore(json.loads(state))

    @property
    def ratio_level(self) -> objectives.RatioLevel:
        """One ratio for each token, or the geometric mean of a completion's."""
        return "token" if self.args.importance_sampling_level == "token" else "sequence_mean"

    @property
    def has_token_losses(self) -> bool:
        """These weigh log-probabilities of tokens, not the ratio."""
        return self.args.loss_type in ("cispo", "vespo")

    @property
    def needs_entropy(self) -> bool:
        """For the bonus."""
        return self.entropy.is_used

    @property
    def compares_entropies(self) -> bool:
        """To choose the tokens of highest entropy."""
        return bool(self.args.top_entropy_quantile < 1.0)

    @property
    def skips_zero_advantages(self) -> bool:
        """Neither the KL penalty in the loss nor the bonus is a multiple of the advantage."""
        return super().skips_zero_advantages and self.args.beta == 0.0 and not self.needs_entropy

    def compute_advantages(self, rewards: Tensor, table: RewardTable, batch: Rollout) -> Tensor:
        """Compare each completion with the mean of its group: (N,)."""
        if self.args.multi_objective_aggregation == "normalize_then_sum":
            return normalize_then_sum(table.per_function, table.weights, table.group_size)
        return group_relative(rewards, table.group_size, self.args.scale_rewards)

    def finish(self, batch: Rollout, advantages: Tensor, healthy: bool) -> Rollout:
        """Choose the tokens of high entropy while the round is whole; see `OnlineTrainer`."""
        if self.compares_entropies:
            batch = batch.replace(objective_mask=self._high_entropies(batch), entropies=None)
        return super().finish(batch, advantages, healthy)

    def _high_entropies(self, batch: Rollout) -> Tensor:
        """Mark the share of the trained-on tokens (B, C) that has the highest entropies.

        It is the share of those of all ranks, which all take part.
        """
        entropies = torch.as_tensor(batch.entropies)
        counted = entropies.masked_fill(~batch.loss_mask, -torch.inf)
        missing = int(self.ranks.max(counted.shape[1])) - counted.shape[1]
        every = self.ranks.gather(pad(counted, (0, missing), value=-torch.inf))
        threshold = entropy_threshold(every.flatten(), self.args.top_entropy_quantile)
        return high_entropy_mask(entropies, batch.loss_mask, threshold)

    def policy_loss(self, scores: TokenScores, ratio: Tensor, batch: Rollout) -> Tensor:
        """Return the objective of the trained-on tokens, with KL penalty and entropy bonus."""
        args, mask, store = self.args, batch.loss_mask, self.metrics[batch.mode]
        losses = self._objective(scores, ratio, batch)
        losses, kept = torch.broadcast_tensors(losses, self._kept(scores, batch))
        losses = torch.where(kept, losses, 0.0)
        if args.beta != 0.0:
            divergence = k3(scores.logps, batch.ref_logps, mask)
            if args.use_bias_correction_kl:
                divergence = divergence * ratio
            store.mean("kl", masked_sum(divergence, mask), mask.sum())
            losses = losses + args.beta * divergence
        loss = self._aggregate(losses, batch)
        if not self.entropy.is_used:
            return loss
        store.value("policy_loss", loss)
        total = masked_sum(scores.entropies, mask)
        if batch.mode == "train":
            self._entropy_seen.append((total.detach(), mask.sum()))
        entropy = total / self.per_micro_batch(batch.num_loss_tokens, batch)
        return loss - self.entropy.active * entropy

    def _objective(self, scores: TokenScores, ratio: Tensor, batch: Rollout) -> Tensor:
        args, advantages, logps = self.args, batch.advantages, scores.logps
        store = self.metrics[batch.mode]
        if args.loss_type in CLIPPED:
            mask = batch.loss_mask if ratio.shape[1] > 1 else batch.loss_mask.any(1, keepdim=True)
            return self.clipped_losses(ratio, batch, mask, args.delta)
        if args.loss_type == "cispo":
            high = 1 + args.epsilon if args.epsilon_high is None else args.epsilon_high
            credit = torch.as_tensor(advantages).view(len(batch), -1)
            clipped, mask = torch.broadcast_tensors((ratio > high) & (credit > 0), batch.loss_mask)
            store.mean("cispo_clip_ratio", (clipped & mask).sum(), mask.sum())
            return batch.weighted(objectives.cispo(ratio, logps, advantages, high))
        if args.loss_type == "sapo":
            high, low = args.sapo_temperature_pos, args.sapo_temperature_neg
            return batch.weighted(objectives.sapo(ratio, advantages, high, low))
        moved = objectives.log_ratio(logps, batch.old_logps, batch.loss_mask, "token")
        if batch.weights is not None:  # part of the ratio that the weight is a function of
            moved = moved + torch.where(batch.loss_mask, batch.weights.log(), 0.0)
        above = objectives.GammaShape(args.vespo_k_pos, args.vespo_lambda_pos)
        below = objectives.GammaShape(args.vespo_k_neg, args.vespo_lambda_neg)
        weight = objectives.vespo_weight(moved, batch.loss_mask, advantages, above, below)
        store.value("vespo/phi_seq_mean", weight.mean())
        return objectives.vespo(weight, logps, advantages)

    def _kept(self, scores: TokenScores, batch: Rollout) -> Tensor:
        """Mark the tokens (B, C) whose objective counts; the KL penalty counts for all."""
        args, kept = self.args, batch.loss_mask
        if batch.objective_mask is not None:
            kept = kept & batch.objective_mask
        if args.off_policy_mask_threshold is not None:
            drawn = batch.sampling_logps
            old_logps = batch.old_logps if drawn is None else drawn
            known = scores.logps, old_logps, batch.advantages, batch.loss_mask
            kept = kept & objectives.off_policy_mask(*known, args.off_policy_mask_threshold)
        return kept

    def _aggregate(self, losses: Tensor, batch: Rollout) -> Tensor:
        kind, mask = self.args.loss_type, batch.loss_mask
        rows = self.per_micro_batch(batch.num_loss_rows, batch)
        if kind in ("grpo", "sapo"):
            return objectives.mean_of_sequence_means(losses, mask, rows)
        denominators = {
            "bnpo": batch.micro_batch_tokens.clamp(min=1),
            "dr_grpo": rows * self.args.max_completion_length,
            "luspo": rows,
        }
        tokens = self.per_micro_batch(batch.num_loss_tokens, batch)
        return objectives.sum_over(losses, mask, denominators.get(kind, tokens))
