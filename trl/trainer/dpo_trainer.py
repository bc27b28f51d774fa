"""DPO: a policy learns which of two answers is preferred, without a reward model."""

import dataclasses

import torch
from torch import Tensor

from ..data.preference_rows import Learner
from ..data.rows import AnswerRows
from ..online.metrics import record_accuracy, record_entropy
from ..ops import preference_losses as objectives
from ..ops.logit_statistics import Collision, LogitStatistic
from ..ops.masking import masked_sum
from ..types import TokenScores
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

    config_class = DPOConfig
    learner = Learner("DPO", ("pair",))
    evaluation_metrics = (
        EVERY_EVALUATION
        | TOKENS
        | SIDES
        | {"rewards/accuracies", "rewards/margins", "rewards/ties"}
    )
    method = Method("DPO", "dpo", arxiv="2305.18290")

    def before_step(self, batches: list[AnswerRows]) -> list[AnswerRows]:
        """Score the reference, and compare all pairs of the step where a loss ranks them."""
        batches = super().before_step(batches)
        names = [name for name in self.args.losses if name in objectives.RANKED]
        if not names:
            return batches
        policy = torch.cat([self.frozen(self.model, rows) for rows in batches])
        reference = torch.cat([rows.values["ref_logps"] for rows in batches])
        counts = torch.cat([rows.values["counts"] for rows in batches])
        ranks = self.ranks.gather_objects(torch.stack([policy, reference], 1)[counts].cpu())
        first = sum(map(len, ranks[: self.ranks.rank]))
        for name in names:
            found = objectives.aot_partners(name, *torch.cat(ranks).unbind(1)).to(policy.device)
            partners = torch.zeros_like(policy)
            partners[counts] = found[first : first + len(ranks[self.ranks.rank])]
            shares = partners.split(list(map(len, batches)))
            pairs = zip(batches, shares, strict=True)  # (B, 2) what each pair is compared with
            batches = [rows.with_values(**{name: share}) for rows, share in pairs]
        return batches

    def answer_logps(self, scores: TokenScores, rows: AnswerRows) -> Tensor:
        """Log-probabilities of answers (B, 2), of policy and reference alike."""
        logps = scores.logps
        if self.args.ld_alpha is not None:
            lengths = rows.values["lengths"]
            sizes = lengths.flatten(), lengths.flip(1).flatten(), logps.shape[1]
            logps = logps * objectives.shared_length_weights(*sizes, self.args.ld_alpha)
        return rows.by_group(logps.sum(1))

    def weigh(self, rows: AnswerRows) -> Tensor:
        """Pairs, and tokens of chosen answers."""
        counts = rows.values["counts"]
        return torch.stack([counts.sum(), (rows.values["lengths"][:, 0] * counts).sum()])

    def statistic(self, rows: AnswerRows) -> LogitStatistic | None:
        """How sure the policy is, where pairs are weighted by that; see `PreferenceTrainer`."""
        return Collision() if self.args.use_weighting else super().statistic(rows)

    def loss_of(self, scores: TokenScores, rows: AnswerRows) -> Tensor:
        """Return the sums (2,) of the losses of pairs, and of the tokens of chosen answers."""
        counts, losses = rows.values["counts"], dict(self.args.losses)
        logps = self.answer_logps(scores, rows)
        ratios = logps - rows.values["ref_logps"]
        likelihood = losses.pop("sft", 0.0) * rows.by_group(scores.logps.sum(1))[:, 0]
        names = [field.name for field in dataclasses.fields(objectives.PairOptions)]
        options = objectives.PairOptions(**{name: getattr(self.args, name) for name in names})
        total = torch.zeros_like(ratios[:, 0])
        for name, weight in losses.items():
            partners = [rows.values[name]] if name in objectives.RANKED else []
            pairs = (ratios, rows.values["lengths"], *partners)  # (B, 2)
            sides = objectives.PairScores(*(side for pair in pairs for side in pair.unbind(1)))
            total = total + weight * objectives.PAIR_LOSSES[name](sides, options)
        if self.args.use_weighting:
            # How likely answers are next to tokens drawn from the policy (WPO, 2406.11827).
            relative = scores.logps.detach() - torch.as_tensor(scores.log_collision)
            lengths = rows.values["lengths"].clamp(min=1)
            total = total * (rows.by_group(relative.sum(1)) / lengths).sum(1).exp()
        self._record(logps.detach(), ratios.detach(), scores, rows)
        return torch.stack([masked_sum(total, counts), -masked_sum(likelihood, counts)])

    def _record(self, logps: Tensor, ratios: Tensor, scores: TokenScores, rows: AnswerRows) -> None:
        store, counts, mask = self.metrics[rows.mode], rows.values["counts"], rows.token_mask()
        values = {"rewards": self.args.beta * ratios, "logps": logps}
        self.record(rows, scores, values, {"chosen": (0, counts), "rejected": (1, counts)})
        margins = values["rewards"][:, 0] - values["rewards"][:, 1]
        found = {"margins": margins, "accuracies": margins > 0, "ties": margins == 0}
        for name, known in found.items():
            store.mean(f"rewards/{name}", masked_sum(known.float(), counts), counts.sum())
        if scores.entropies is not None:
            record_entropy(store, scores.entropies.detach(), mask)
            record_accuracy(store, torch.as_tensor(scores.hits)[::2], mask[::2])
