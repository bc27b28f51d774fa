"""KTO: answers that are desirable or not, each by itself."""

from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from torch import nn
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import logging

from ..algorithms.base import LossTerms
from ..algorithms.kto import KTO, AnswerRatios
from ..batch import Batch, Step
from ..data.encode import TextEncoder
from ..data.preference_cutting import add_kl_answers, with_kl_answers
from ..data.preference_rows import Learner
from ..data.streams import PreparedStream
from ..types import Mode, TokenScores
from .base.best_metric import EVERY_EVALUATION, SIDES
from .kto_config import KTOConfig
from .model_card import Method
from .offline.preference_trainer import PreferenceTrainer

logger = logging.get_logger(__name__)

BAND = 1.33  # how much more one label may weigh in total than the other


class KTOTrainer(PreferenceTrainer):
    """Trains on answers with a label, True for desirable ones, against a reference policy.

    The loss of an optimizer step is the mean of w (1 - sigmoid(+-beta (r - z))) over all its
    answers, with the log-ratio r of policy and reference, the sign and weight w of the label, and
    the KL estimate z: the mean, over the step, of log-ratios of answers that belong to other
    prompts, at least 0 and without gradient.

    Datasets have `prompt`, `completion` and `label`, or pairs (`chosen`, `rejected`), which become
    two answers each. Arguments are those of `PreferenceTrainer`.
    """

    args: KTOConfig
    config_class = KTOConfig
    evaluation_metrics = EVERY_EVALUATION | SIDES | {"entropy", "kl", "rewards/margins"}
    learner = Learner("KTO", ("labelled", "pair"))
    unpairs = True
    algorithm: KTO
    _one_forward: Step  # a step whose KL estimate the forward that trains will make
    _evaluated: list[AnswerRatios]  # of the batches of the evaluation that is running
    method = Method("KTO", "kto", arxiv="2402.01306")

    def prepare_dataset(
        self, dataset: Dataset | IterableDataset, encoder: TextEncoder, args: KTOConfig, mode: Mode
    ) -> Any:
        """Tokenize, cut to length, and choose the answers of the KL estimate."""
        answers = self.cut_answers(dataset, encoder, args, mode)
        if isinstance(answers, PreparedStream):
            if args.estimates_kl:
                answers.arrange = partial(add_kl_answers, limits=args.limits)
            return answers
        prepared = answers.checked(str(args.limits))
        if mode == "train":
            advise_weights(np.asarray(prepared["label"][:]), args)
        return with_kl_answers(answers, args.limits, args.seed) if args.estimates_kl else prepared

    def num_tokens(self, batch: Batch) -> int:
        """Count the tokens of prompts and their own answers."""
        return batch.select_branch(0).num_tokens

    def credit(self, step: Step) -> Step:
        """Estimate the KL divergence over the whole step.

        The policy scores mismatched answers beforehand, unless one forward behind the same prompts
        is all of the step, or the estimate can wait for the end of an evaluation.
        """
        if not self.args.estimates_kl:
            return super().credit(step)
        if step.mode == "eval":
            return step
        if self._is_one_forward(step):
            self._one_forward = step
            return step
        return self._estimate_beforehand(step)

    def _is_one_forward(self, step: Step) -> bool:
        """Whether every rank computes the step in one forward.

        All ranks must estimate at the same point, during the forward or before it: forwards of DDP
        communicate, too.
        """
        is_one = len(step.batches) == 1 and len(self.runner.chunks(step.batch)) == 1
        return self.ranks.all(is_one)

    def _estimate_beforehand(self, step: Step) -> Step:
        """Score the mismatched answers of a step, and add the estimate."""
        batches = []
        with self.phases("scoring"):
            for batch in step.batches:
                mismatched = batch.select_branch(1)
                logps = self.annotator.logps(self.model, mismatched)
                batches.append(self.algorithm.with_mismatched_ratios(batch, mismatched, logps))
        return super().credit(step.with_batches(batches))

    def score(self, model: nn.Module, batch: Batch) -> tuple[Batch, TokenScores]:
        """Score the own answers of prompts; while evaluating, mismatched ones as well."""
        if batch.mode == "eval" or not self.args.estimates_kl:
            return super().score(model, batch)
        if "kl" in batch.columns:
            return super().score(model, batch.select_branch(0))
        if len(batch) == len(self._one_forward.batch):
            return self._score_with_mismatched(model, batch)
        # The step was cut after out-of-memory. Only runs of one process continue after that, so no
        # other rank waits.
        if "kl" not in self._one_forward.batch.columns:
            self._one_forward = self._estimate_beforehand(self._one_forward)
        own = batch.select_branch(0)
        kl = self._one_forward.batch.columns["kl"][: len(own)]
        return super().score(model, own.with_columns(kl=kl))

    def _score_with_mismatched(self, model: nn.Module, batch: Batch) -> tuple[Batch, TokenScores]:
        """Score a step in one forward: mismatched answers without gradient, and the estimate."""
        own = batch.select_branch(0)
        mismatched = batch.select_branch(1)
        reader = self.token_reader(model, batch.mode)
        scores, logps = self.scorer.with_others(
            model, own.rows, mismatched.rows, reader.with_entropy, reader.statistic
        )
        self.guard.watch("log-probability", scores.logps, own.rows)
        own = self.algorithm.with_mismatched_ratios(own, mismatched, logps)
        return super().credit(Step(batches=[own], ranks=self.ranks)).batch, scores

    def loss(self, scores: TokenScores, batch: Batch) -> LossTerms:
        """Return the sum over answers; that of an evaluation is known when it ends."""
        if batch.mode == "train" or not self.args.estimates_kl:
            return super().loss(scores, batch)
        self.collect_predictions(scores, batch)
        self.algorithm.record(scores, batch, self.metrics["eval"])
        self._evaluated.append(self.algorithm.answer_ratios(scores, batch))
        return {"kto": (scores.logps.new_zeros(()), batch.totals.groups)}

    def evaluation_loop(self, *args: object, **options: object) -> EvalLoopOutput:
        """Evaluate; the KL estimate is over the whole dataset, whatever its batches are."""
        if not self.args.estimates_kl:
            return super().evaluation_loop(*args, **options)
        self._evaluated = []
        output = super().evaluation_loop(*args, **options)
        loss_sums, kl = self.algorithm.losses_of_evaluation(self._evaluated, self.ranks)
        metrics = self.metrics["eval"]
        metrics.value("kl", kl)
        for loss_sum in loss_sums:
            # `record_loss` has recorded the totals of the batches as weights, with sums of 0.
            metrics.mean("loss", loss_sum[None], 0.0)
        self._evaluated = []
        return output


def advise_weights(labels: np.ndarray, args: KTOConfig) -> None:
    """Warn if one label (rows,) bool weighs much more than the other in total."""
    good, bad = int(labels.sum()), int((~labels).sum())
    if good == bad or min(good, bad) == 0:
        return
    low, high = bad * args.undesirable_weight / good, good * args.desirable_weight / bad
    if low <= args.desirable_weight <= BAND * low or high / BAND <= args.undesirable_weight <= high:
        return
    logger.warning(
        f"{good} rows are desirable and {bad} are not. To let both weigh about the same, set "
        f"desirable_weight between {low:.2f} and {BAND * low:.2f}, or undesirable_weight between "
        f"{high / BAND:.2f} and {high:.2f}."
    )
