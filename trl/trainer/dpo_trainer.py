"""DPO: a policy learns which of two answers is preferred, without a reward model."""

from ..data.preference_rows import Learner
from .base.best_metric import EVERY_EVALUATION, SIDES, TOKENS
from .dpo_config import DPOConfig
from .model_card import Method
from .offline.preference_trainer import PreferenceTrainer


class DPOTrainer(PreferenceTrainer):
    """Trains on pairs of a chosen and a rejected answer to a prompt (DPO, arXiv 2305.18290).

    With log pi(y) the sum of the log-probabilities of an answer's tokens, and log-ratios
    c = log pi(chosen) - log ref(chosen) and r, of the rejected answer, the loss of a pair is

        -log sigmoid(beta * (c - r))

    or another one that `loss_type` names. It is averaged over all pairs of an optimizer step. The
    prompt of a pair is computed once.

    Datasets have `chosen` and `rejected`, with `prompt` or with a common beginning: strings,
    messages, or ids. Arguments are those of `PreferenceTrainer`.
    """

    args: DPOConfig
    config_class = DPOConfig
    learner = Learner("DPO", ("pair",))
    evaluation_metrics = (
        EVERY_EVALUATION
        | TOKENS
        | SIDES
        | {"rewards/accuracies", "rewards/margins", "rewards/ties"}
    )
    method = Method("DPO", "dpo", arxiv="2305.18290")
