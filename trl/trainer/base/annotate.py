"""Scoring without gradient, for every trainer: what an algorithm `Needs` before credit.

Only the mismatched answers of KTO are scored elsewhere, by its trainer.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...algorithms.base import Needs
from ...batch import Batch, Step
from ...memory.adaptive_batch import AdaptiveBatch
from ...models.reference import ReferencePolicy
from ...models.scorer import Reader, Scorer
from ...online.guard import FiniteGuard
from ...ops.logit_statistics import LogitStatistic

# What `TokenScores` calls a column that is not `old_logps` or `ref_logps`.
SAME_NAME = ("log_mass", "values", "entropies")


@dataclass(kw_only=True)
class Annotator:
    """Adds the columns that are computed without gradient to the batches of a step.

    Batches are scored in chunks, which become smaller where memory runs out.
    """

    policy: Callable[[], nn.Module]  # as it is wrapped for training
    scorer: Scorer
    guard: FiniteGuard  # is shown all that is computed
    chunks: Callable[[Batch], list[Batch]]  # cuts what is tried at once further, by its tokens
    size: AdaptiveBatch  # how many units are tried at once; halved when memory runs out
    autocast: Callable[[], AbstractContextManager[Any]]  # the precision of training
    reference: ReferencePolicy | None = None
    value_reader: Callable[[nn.Module], Reader | None] = lambda model: None  # where values are read

    def __call__(
        self,
        step: Step,
        needs: Needs,
        support: LogitStatistic | None = None,
        max_units: int | None = None,
    ) -> Step:
        """Add the columns that `needs` names and the batches do not have.

        `support` are the filters that an engine drew through, if the policy is to be compared with
        what it reported; `max_units` is an upper bound of `size` for this call.
        """
        scores_policy = needs.old_logps or needs.values or needs.credit_entropies
        if scores_policy and "old_logps" not in step.batches[0].columns:
            step = self._with_policy_scores(step, needs, support, max_units)
        columns = step.batches[0].columns
        if needs.ref_logps and "ref_logps" not in columns and "ref_answer_logps" not in columns:
            step = self._with_reference_logps(step, max_units)
        return step

    def _with_policy_scores(
        self, step: Step, needs: Needs, support: LogitStatistic | None, max_units: int | None
    ) -> Step:
        model = self.policy()
        reader = self.value_reader(model) if needs.values else None
        if needs.values and reader is None:
            raise ValueError("The algorithm needs values: the trainer must override value_reader.")
        names = ["logps"]
        names += ["log_mass"] if support is not None else []
        names += ["values"] if reader is not None else []
        names += ["entropies"] if needs.credit_entropies else []
        batches = []
        for batch in step.batches:
            scores = self._score(model, batch, names, max_units, support, reader)
            self._watch("log-probability of the policy", scores["logps"], batch)
            if "values" in scores:
                self._watch("value", scores["values"], batch)
            columns: Any = {name: scores[name] for name in SAME_NAME if name in scores}
            batches.append(batch.with_columns(old_logps=scores["logps"], **columns))
        return step.with_batches(batches)

    def _with_reference_logps(self, step: Step, max_units: int | None) -> Step:
        if self.reference is None:
            raise ValueError("The loss reads reference log-probabilities: pass a reference.")
        batches = []
        with self.reference.active(self.policy()) as model:
            for batch in step.batches:
                logps = self.logps(model, batch, max_units)
                batches.append(batch.with_columns(ref_logps=logps))
        return step.with_batches(batches)

    def logps(self, model: nn.Module, batch: Batch, max_units: int | None = None) -> Tensor:
        """Log-probabilities (B, C) of the tokens of a batch under a model, without gradient."""
        logps = self._score(model, batch, ["logps"], max_units)["logps"]
        description = "log-probability without gradient"
        if model is not self.policy():
            description = "log-probability of the reference"
        self.guard.watch(description, logps, batch.rows)  # also of answers without a loss
        return logps

    @torch.no_grad()
    def _score(
        self,
        model: nn.Module,
        batch: Batch,
        names: list[str],
        max_units: int | None,
        support: LogitStatistic | None = None,
        reader: Reader | None = None,
    ) -> dict[str, Tensor]:
        """What `TokenScores` calls by these names: (B, C) each."""
        results: dict[str, Tensor] = {}

        def score(units: range) -> None:
            row = batch.units[units.start].start
            for chunk in self.chunks(batch.select_units(units)):
                scores = self.scorer.frozen_scores(
                    model, chunk.rows, support, reader, "entropies" in names
                )
                rows, width = slice(row, row + len(chunk)), scores.logps.shape[1]
                for name in names:
                    values = getattr(scores, name)
                    if name not in results:
                        results[name] = values.new_zeros(batch.loss_mask.shape)
                    results[name][rows, :width] = values
                row = rows.stop

        with self.autocast():
            self.size.run(len(batch.units), score, most=max_units)
        return results

    def _watch(self, description: str, values: Tensor, batch: Batch) -> None:
        self.guard.watch(description, values, batch.rows, batch.loss_mask)
