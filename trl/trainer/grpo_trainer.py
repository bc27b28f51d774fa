"""GRPO: advantages relative to the group, and a per-token objective with many variants."""

import json
from pathlib import Path

from ..algorithms.entropy_bonus import EntropyController
from ..algorithms.grpo import GRPO
from ..types import EnvironmentFactory as EnvironmentFactory
from ..types import RewardFunc as RewardFunc
from ..types import RolloutFunc as RolloutFunc
from .base.best_metric import CLIPPING, SAMPLING
from .grpo_config import GRPOConfig
from .model_card import Method
from .online.online_trainer import OnlineTrainer

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
    evaluation_metrics = (
        OnlineTrainer.evaluation_metrics
        | CLIPPING
        | SAMPLING
        | {"cispo_clip_ratio", "kl", "policy_loss", "vespo/phi_seq_mean"}
    )
    method = Method("GRPO", "grpo", arxiv="2402.03300")

    algorithm: GRPO

    @property
    def entropy(self) -> EntropyController:
        """The weight of the entropy bonus."""
        return self.algorithm.entropy

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
