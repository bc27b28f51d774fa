"""One training step for trainers that compare a policy with a reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, ClassVar

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers import TrainerCallback

from ...data.encode import TextEncoder
from ...models.reference import AdapterOff, FrozenCopy, ReferencePolicy
from ...ops.masking import masked_sum
from ...ops.support import MeanLogit, Support
from ...types import Mode, TokenScores
from ..base.policy import Policy
from .answers import prepare_answers
from .offline_config import PreferenceConfig
from .offline_trainer import OfflineTrainer
from .precomputed import Precomputation, check_known, reference_weights, scoring_facts

Values = dict[str, Tensor]
Sides = Mapping[str, tuple[int, Tensor]]


class PreferenceTrainer(OfflineTrainer):
    """The skeleton of DPO and KTO: answers to prompts, scored by the reference before each step.

    Args:
        ref_model (*optional*): the reference, by name or loaded. None: a frozen copy of the model,
            or the model without its adapter.
        args (`PreferenceConfig`, *optional*): options.
        data_collator: refused, as is `compute_metrics`.

    The other arguments are those of `OfflineTrainer`.
    """

    args: PreferenceConfig
    unpairs: ClassVar[bool] = False  # whether a pair becomes two answers with a label
    _has_let_go = False  # of the reference

    def __init__(
        self,
        model: str | nn.Module,
        ref_model: Any = None,
        args: PreferenceConfig | None = None,
        data_collator: Any = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ):
        self._given = ref_model
        super().__init__(
            *(model, args, data_collator, train_dataset, eval_dataset, processing_class),
            *(compute_metrics, callbacks, optimizers),
            quantization_config=quantization_config,
            peft_config=peft_config,
        )

    def set_up(self, policy: Policy, model: Any) -> None:
        """Make the reference, and score with it what is wanted beforehand if that can be now."""
        # Ranks take part in each other's passes, so none of them can repeat one alone.
        self._scoring = self.phases.adaptive("scoring", alone=self.ranks.count > 1)
        if self.args.needs_reference:
            self._make_reference(policy.brought_adapter, self._given, model)
            self._precompute(FrozenCopy)
        self._given = None

    def prepare_dataset(self, dataset: Any, encoder: TextEncoder, args: Any, mode: Mode) -> Any:
        """Tokenize prompts with their answers, and cut them to length."""
        check_known(dataset, mode, args, self._has_let_go)
        return prepare_answers(dataset, encoder, args, args.limits, self.unpairs)

    # --- The reference ---

    def begin_training(self) -> None:
        """Compute what is wanted beforehand, and let go of a model that is not needed for more."""
        if self.reference is None or not self.args.precompute_ref_log_probs:
            return
        # By now the policy is prepared for training, as it must be where it is sharded.
        self._precompute(AdapterOff)
        if isinstance(self.reference, FrozenCopy):
            self.reference, self._has_let_go = None, True

    def _precompute(self, kind: type[ReferencePolicy]) -> None:
        """Score all datasets with a reference of some kind, if that is wanted."""
        args, others, reference = self.args, self.eval_dataset, self.reference
        if not args.precompute_ref_log_probs or not isinstance(reference, kind):
            return
        with reference.active(self.model) as model:

            def score(rows: Any) -> Tensor:
                self._agree_on(rows, model)
                return self.frozen(model, rows.to(args.device), self.answer_logps)

            rows = args.precompute_ref_batch_size or args.per_device_train_batch_size
            work = Precomputation(
                ranks=self.ranks,
                collate=self.collate,
                score=score,
                limits=(rows, args.max_tokens_per_micro_batch),
                facts=scoring_facts(args, model),
            )
            found = others.values() if isinstance(others, Mapping) else [others]
            for dataset in (self.train_dataset, *(x for x in found if x is not None)):
                work.fill(dataset, reference_weights(reference))

    def before_step(self, batches: list[Any]) -> list[Any]:
        """Add the `ref_logps` of answers (B, K), unless they were computed beforehand."""
        return list(map(self._with_reference, batches))

    def _with_reference(self, rows: Any) -> Any:
        if "ref_logps" in rows.values:
            return rows
        if self.reference is None:  # all answers have the same probability
            return rows.with_values(ref_logps=rows.values["lengths"] * 0.0)
        with self.reference.active(self.model) as model:
            return rows.with_values(ref_logps=self.frozen(model, rows, self.answer_logps))

    # --- Scores ---

    @torch.no_grad()
    def frozen(
        self, model: nn.Module, rows: Any, read: Callable[[TokenScores, Any], Tensor]
    ) -> Tensor:
        """Score rows without gradient, in the pieces of training.

        What is returned are the values (B, ...) that `read` makes of scores and rows.
        """

        def score(part: Any) -> Tensor:
            scores = self.scorer.frozen_scores(model, part.flat)
            self.guard.watch("log-probability without gradient", scores.logps, part.flat)
            return read(scores, part)

        def work(at: range) -> Tensor:
            return torch.cat(list(map(score, self.phases.pieces(rows.select(at)))))

        with self.phases("scoring"), self.accelerator.autocast():
            return torch.cat(self._scoring.run(len(rows), work))

    def answer_logps(self, scores: TokenScores, rows: Any) -> Tensor:
        """Log-probabilities of the answers of some rows (B, K): sums over their tokens."""
        return rows.by_group(scores.logps.sum(1))

    def support(self, rows: Any) -> Support | None:
        """What is read off logits besides log-probabilities: their mean, when it is logged."""
        return MeanLogit() if self.logs_next(rows.mode) else None

    def score_with_others(
        self, model: nn.Module, rows: Any, others: Any
    ) -> tuple[TokenScores, Tensor]:
        """As `score`, with log-probabilities (B, K), without gradient, of others to the prompts."""
        options = self.logs_next(rows.mode), self.support(rows)
        scores, logps = self.scorer.with_others(model, rows.flat, others.flat, *options)
        self.guard.watch("log-probability", scores.logps, rows.flat)
        return scores, others.by_group(logps.sum(1))

    def record(self, rows: Any, scores: TokenScores, values: Values, sides: Sides) -> None:
        """Record means of values (B, K) of answers, and of logits, for both sides of preferences.

        `sides` says which answer is chosen, and which is rejected, of which prompts (B,).
        """
        store, tokens, logits = self.metrics[rows.mode], rows.token_mask(), scores.log_mass
        count = {name: torch.ones_like(found) for name, found in values.items()}
        if logits is not None and isinstance(self.support(rows), MeanLogit):
            values = values | {"logits": rows.by_group(masked_sum(logits, tokens, 1))}
            count["logits"] = rows.by_group(tokens.sum(1))
        for (side, (answer, mask)), name in product(sides.items(), values):
            found = (masked_sum(x[name][:, answer], mask) for x in (values, count))
            store.mean(f"{name}/{side}", *found)
        self.keep(rows, **{name: found for name, found in values.items() if name != "logits"})
