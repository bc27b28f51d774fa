"""Where rollout batches come from: prompts, their completions, and rewards for these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import TrainerState

from ...batch import Batch, Step
from ...distributed import Ranks
from ...memory.phases import Phases
from ...online.metrics import MetricStore
from ...online.prompts import PromptEncoder
from ...online.reports import Round
from ...online.rewards import RewardInputs, RewardSuite
from ...types import Mode, Prompts, RewardTable
from .online_config import OnlineConfig
from .rollout_batch import mark_truncated, rollout_batch

if TYPE_CHECKING:
    from ...generation.base import Generations


@dataclass(frozen=True)
class RoundId:
    """Identity of a round: it decides all random numbers that its completions are drawn with."""

    number: int  # rounds of the run before it; in evaluation, batches of the evaluation before it
    version: int  # optimizer steps that made the weights that generate
    mode: Mode = "train"

    def seeds(self, seed: int, first_row: int, count: int) -> tuple[int, ...]:
        """Return a seed for each of `count` rows, whose first is `first_row` of all ranks."""
        from ...generation.base import row_seeds

        key: tuple[object, ...] = (seed, self.mode, self.number)
        if self.mode == "eval":  # the numbers of each evaluation begin at 0
            key = (seed, self.mode, self.version, self.number)
        return row_seeds(key, first_row, count)


@dataclass(frozen=True, kw_only=True)
class RewardedRollouts:
    """A rollout batch before credit, and what is reported of it: B rows of this rank."""

    round_id: RoundId
    step: Step  # whose table says which completions were truncated
    prompts: Prompts  # B
    completions: list[Any]  # B: strings, or lists of messages
    generations: Generations  # B
    table: RewardTable  # as the reward functions returned it
    extras: dict[str, list[Any]]  # columns that reward functions added, B values each

    def report(
        self,
        number: int,
        advantages: Tensor,
        token_texts: Callable[[Sequence[int]], list[str]] | None,
    ) -> Round:
        """Return what is reported, with the number of the round within its optimizer step.

        `advantages` (N,) are those of the completions of all ranks; `token_texts` decodes tokens,
        if they are to be recorded.
        """
        return Round(
            step=self.round_id.version,
            number=number,
            prompts=self.prompts,
            completions=self.completions,
            generations=self.generations,
            table=self.table,
            extras=self.extras,
            advantages=advantages,
            token_texts=token_texts,
        )


@dataclass(kw_only=True)
class RolloutSource:
    """Prompts -> completions -> rewards: a function of a `RoundId`, its prompts and the weights."""

    args: OnlineConfig
    encode: PromptEncoder
    generate: Callable[[Prompts, Mode], Generations]  # with the seeds of the prompts
    rewards: RewardSuite
    keeps_groups: bool  # chunks keep the completions of a prompt together
    ranks: Ranks
    phases: Phases
    metrics: dict[Mode, MetricStore]

    def take(
        self, round_id: RoundId, rows: Sequence[dict[str, Any]], state: TrainerState
    ) -> RewardedRollouts:
        """Complete the rows of this rank, and reward the completions of all ranks.

        `state` is for reward functions to read.
        """
        mode = round_id.mode
        with self.ranks.fail_together("reading prompts"):
            prompts = self.encode(rows)
        first_row = self.ranks.rank * len(rows)
        seeds = round_id.seeds(self.args.seed, first_row, len(rows))
        with self.phases.inference("generation", len(rows)):
            generations = self.generate(dataclasses.replace(prompts, seeds=seeds), mode)
        prompts = generations.completed_prompts(prompts)
        examples = generations.with_extra_columns(rows)
        ids = generations.completion_ids
        completions = generations.messages or self.encode.completions(prompts, ids)
        batch = self._batch(prompts, generations, first_row, mode)
        with self.phases("rewards"):
            table, extras = self.rewards(
                RewardInputs(examples, completions, ids, state),
                self.args.group_size_in(mode),
                self.metrics[mode].value,
            )
        marked = mark_truncated(
            table, generations.truncated(), self.args.mask_truncated_completions, self.ranks
        )
        return RewardedRollouts(
            round_id=round_id,
            step=Step(batches=[batch], ranks=self.ranks, table=marked),
            prompts=prompts,
            completions=completions,
            generations=generations,
            table=table,
            extras=extras,
        )

    def _batch(
        self, prompts: Prompts, generations: Generations, first_row: int, mode: Mode
    ) -> Batch:
        batch = rollout_batch(
            prompts,
            generations,
            first_row,
            group_size=self.args.group_size_in(mode),
            masks_truncated=self.args.mask_truncated_completions,
        )
        batch = dataclasses.replace(batch, mode=mode, keeps_groups=self.keeps_groups)
        return batch.to(self.args.device)
