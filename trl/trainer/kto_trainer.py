"""KTO: answers that are desirable or not, each by itself."""

import dataclasses
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..data.encode import TextEncoder
from ..data.preference_cutting import add_kl_answers, with_kl_answers
from ..data.preference_rows import Learner
from ..data.rows import AnswerRows
from ..data.streams import PreparedStream
from ..online.metrics import record_entropy
from ..ops.masking import masked_sum
from ..ops.preference_losses import kto_loss
from ..types import Mode, TokenScores
from .base.best_metric import EVERY_EVALUATION, SIDES
from .kto_config import KTOConfig
from .model_card import Method
from .offline.preference_trainer import PreferenceTrainer

logger = logging.get_logger(__name__)

BAND = 1.33  # how much more one label may weigh in total than the other


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledRows(AnswerRows):
    """Prompts with an answer that has a label, and perhaps another example's answer after it."""

    def tokens(self) -> int:
        """Tokens of prompts and their own answers, of rows that count."""
        counted = (group for group in self.items if group.counts)
        return sum(len(group.prompt_ids) + len(group.answer_ids[0]) for group in counted)

    def answer(self, number: int) -> Self:
        """Rows of one answer: 0 for their own, 1 for the other example's."""
        one = slice(number, number + 1)
        items = [dataclasses.replace(x, answer_ids=x.answer_ids[one]) for x in self.items]
        columns = {name: self.values[name][:, one] for name in ("lengths", "ref_logps")}
        return dataclasses.replace(self, items=items, values=self.values | columns)


class KTOTrainer(PreferenceTrainer):
    """Trains on answers with a label, True for desirable ones, against a reference policy.

    The loss of an optimizer step is the mean of w (1 - sigmoid(+-beta (r - z))) over all its
    answers, with the log-ratio r of policy and reference, the sign and weight w of the label, and
    the KL estimate z: the mean, over the step, of log-ratios of answers that belong to other
    prompts, at least 0 and without gradient.

    Datasets have `prompt`, `completion` and `label`, or pairs (`chosen`, `rejected`), which become
    two answers each. Arguments are those of `PreferenceTrainer`.
    """

    config_class = KTOConfig
    evaluation_metrics = EVERY_EVALUATION | SIDES | {"entropy", "kl", "rewards/margins"}
    rows_class: ClassVar[Any] = LabelledRows
    learner = Learner("KTO", ("labelled", "pair"))
    unpairs = True
    _step: list[LabelledRows]  # the micro-batches that are trained on
    _kl: Tensor | None  # their KL estimate (), once it is known
    _evaluated: list[tuple[LabelledRows, Tensor]]  # rows of an evaluation, and log-ratios (B, K)
    method = Method("KTO", "kto", arxiv="2402.01306")

    def prepare_dataset(
        self, dataset: Any, encoder: TextEncoder, args: KTOConfig, mode: Mode
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

    def before_step(self, batches: list[LabelledRows]) -> list[LabelledRows]:
        """Score with the reference, and estimate the KL divergence over the whole step.

        The policy scores the other answers beforehand, unless one forward behind the same prompts
        is all of the step, or the estimate can wait for the end of an evaluation.
        """
        batches = super().before_step(batches)
        if batches[0].mode == "train":
            self._step = batches
            self._kl = None
            if not (self.args.estimates_kl and self._is_one_forward(batches)):
                self._kl = self._estimate_beforehand()
        return batches

    def _is_one_forward(self, batches: list[LabelledRows]) -> bool:
        """Whether every rank computes the step in one forward.

        All ranks must estimate at the same point, during the forward or before it: forwards of DDP
        communicate, too.
        """
        mine = len(batches) == 1 and len(self.runner.chunks(batches[0])) == 1
        return self.ranks.all(mine)

    def score(self, model: nn.Module, rows: LabelledRows) -> TokenScores:
        """Score the rows' own answers; while evaluating, the other ones as well."""
        if rows.mode == "eval":
            return super().score(model, rows)
        own = rows.answer(0)
        if self._kl is None and rows.share_of_micro_batch == 1:
            # Others are scored without gradient, behind the prompts that are computed here.
            others, options = rows.answer(1), (self.logs_next(rows.mode), self.statistic(own))
            scores, logps = self.scorer.with_others(model, own.flat, others.flat, *options)
            self.guard.watch("log-probability", scores.logps, own.flat)
            ratios = others.by_group(logps.sum(1)) - others.values["ref_logps"]
            self._kl = self._estimate([(others, ratios)])
            return scores
        if self._kl is None:  # cut after running out of memory, which happens on one process only
            self._kl = self._estimate_beforehand()
        return super().score(model, own)

    def _estimate_beforehand(self) -> Tensor:
        found = []
        for rows in self._step if self.args.estimates_kl else ():
            others = rows.answer(1)
            logps = self.frozen(self.model, others)
            found.append((others, logps - others.values["ref_logps"]))
        return self._estimate(found)

    def _estimate(self, found: list[tuple[LabelledRows, Tensor]]) -> Tensor:
        """The KL estimate () of log-ratios (B, K), of which the last are those of other answers."""
        if not self.args.estimates_kl:
            return torch.zeros((), device=self.args.device)
        counts = torch.cat([rows.values["counts"] for rows, _ in found])
        ratios = torch.cat([ratios[:, -1].detach() for _, ratios in found])
        sums = torch.stack([masked_sum(ratios, counts), counts.sum()])
        total, count = self.ranks.sum(sums).unbind()
        return (total / count.clamp(min=1)).clamp(min=0)

    def loss_of(self, scores: TokenScores, rows: LabelledRows) -> Tensor:
        """Return the sum of the losses of all answers (1,)."""
        rows = rows if rows.mode == "eval" else rows.answer(0)
        logps = self.answer_logps(scores, rows)
        ratios = logps - rows.values["ref_logps"]
        self._record(scores, logps.detach()[:, :1], ratios.detach()[:, :1], rows)
        if rows.mode == "eval":
            self._evaluated.append((rows, ratios))
            return ratios.new_zeros(1)
        kl = torch.as_tensor(self._kl)
        self.metrics["train"].value("kl", kl)
        return self._losses(ratios, rows, kl)

    def _losses(self, ratios: Tensor, rows: LabelledRows, kl: Tensor) -> Tensor:
        """The sum of the losses (1,) of log-ratios (B, K), of which the first are the rows' own."""
        args, label = self.args, rows.values["label"]
        weights = torch.where(label, args.desirable_weight, args.undesirable_weight)
        losses = weights * kto_loss(ratios[:, 0], label, kl, args.beta)
        return masked_sum(losses, rows.values["counts"])[None]

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Evaluate; the KL estimate is over the whole dataset, whatever its batches are."""
        self._evaluated = []
        output = super().evaluation_loop(*args, **options)
        kl, store = self._estimate(self._evaluated), self.metrics["eval"]
        store.value("kl", kl)
        for rows, ratios in self._evaluated:  # whose weights the metric knows
            store.mean("loss", self._losses(ratios, rows, kl), 0.0)
        self._evaluated = []
        return output

    def _record(self, scores: TokenScores, logps: Tensor, ratios: Tensor, rows: Any) -> None:
        store, counts, label = self.metrics[rows.mode], rows.values["counts"], rows.values["label"]
        values = {"rewards": self.args.beta * ratios, "logps": logps}
        masks = [label & counts, ~label & counts]
        self.record(rows, scores, values, {"chosen": (0, masks[0]), "rejected": (0, masks[1])})
        good, bad = (masked_sum(values["rewards"][:, 0], mask) for mask in masks)
        weights = torch.stack([mask.sum() for mask in masks])
        store.mean("rewards/margins", torch.stack([good, -bad]), weights)
        if scores.entropies is not None:
            own = slice(None, None, len(scores.logps) // len(rows))
            record_entropy(store, scores.entropies.detach()[own], rows.token_mask()[own])


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
