"""GRPO: advantages relative to the group, and a per-token objective with many variants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..online.statistics import record_clipping
from ..ops.advantages import group_relative, normalize_then_sum
from ..ops.entropy import entropy_threshold
from ..ops.kl import k3
from ..ops.masking import masked_mean, masked_sum
from ..ops.policy_losses import (
    cispo,
    clip_flags,
    clipped_surrogate,
    importance_ratio,
    off_policy_mask,
    sapo,
    vespo,
)
from ..types import RewardTable, Rollout, TokenScores
from .entropy_control import EntropyController
from .grpo_config import GRPOConfig
from .model_card import Method
from .online_trainer import OnlineTrainer

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
STATE_FILE = "entropy_ctrl_state.json"


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
    method = Method(
        name="GRPO",
        tag="grpo",
        paper="DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
        arxiv="2402.03300",
        citation="""
@article{shao2024deepseekmath,
    title  = {{DeepSeekMath}: Pushing the Limits of Mathematical Reasoning in Open Language Models},
    author = {Zhihong Shao and Peiyi Wang and Qihao Zhu and Runxin Xu and Junxiao Song and
              Mingchuan Zhang and Y. K. Li and Y. Wu and Daya Guo},
    year   = 2024,
    eprint = {2402.03300}
}""",
    )

    def _build_stages(self, sources: Any, brought_adapter: bool) -> None:
        super()._build_stages(sources, brought_adapter)
        by_sequence = self.args.importance_sampling_level == "sequence"
        self.ratio_level = "sequence_mean" if by_sequence else "token"
        self.entropy = EntropyController.from_args(self.args)

    def compute_advantages(self, rewards: Tensor, table: RewardTable) -> Tensor:
        """Compare each completion with the mean of its group: (N,)."""
        if self.args.multi_objective_aggregation == "normalize_then_sum":
            return normalize_then_sum(table.per_function, table.weights, table.group_size)
        return group_relative(rewards, table.group_size, self.args.scale_rewards)
