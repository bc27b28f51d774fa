"""From what an engine generated to the rows that are trained on."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ...distributed import Ranks
from ...ops.masking import length_mask, pad_ragged
from ...types import Generations, Mode, Prompts, RewardTable, Rollout
from .online_config import OnlineConfig


def assemble(
    prompts: Prompts, generations: Generations, mode: Mode, args: OnlineConfig, ranks: Ranks
) -> Rollout:
    """Say which tokens are trained on, and count them over all ranks."""
    ids = generations.completion_ids
    lengths = torch.tensor([len(row) for row in ids])
    mask = length_mask(lengths, int(lengths.max()))
    if generations.trainable is not None:
        mask = mask & pad_ragged(generations.trainable, False, width=mask.shape[1]).bool()
    if args.mask_truncated_completions:
        mask = mask & ~_truncated(generations)[:, None]
    mask = mask.to(args.device)
    totals = ranks.sum(torch.stack([mask.sum(), mask.any(1).sum()]))
    logps = generations.sampling_logps
    if logps is not None:
        logps = pad_ragged(logps, 0.0, dtype=torch.float32).to(args.device)
    return Rollout(
        prompt_ids=prompts.token_ids,
        completion_ids=ids,
        row_ids=list(range(len(ids))),
        loss_mask=mask,
        num_loss_tokens=totals[0],
        num_loss_rows=totals[1],
        mode=mode,
        num_micro_batches=args.batch_plan.micro_batches if mode == "train" else 1,
        sampling_logps=logps,
    )


def credited(
    table: RewardTable, generations: Generations, args: OnlineConfig, ranks: Ranks
) -> RewardTable:
    """Say which completions of all ranks were cut off; they give no credit if they are masked."""
    cut = ranks.gather(_truncated(generations).to(args.device))
    table = dataclasses.replace(table, ended=~cut)
    return table.without(cut) if args.mask_truncated_completions else table


def rows_with_gradient(batch: Rollout, advantages: Tensor) -> list[bool]:
    """Mark the rows whose gradient is not exactly zero, if each term has the advantage in it."""
    credited = (advantages != 0).view(len(batch), -1) & batch.loss_mask
    return credited.any(1).tolist()


def _truncated(generations: Generations) -> Tensor:
    return torch.tensor([reason != "stop" for reason in generations.finish])
