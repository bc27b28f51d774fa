"""Metrics of one round, from values gathered over all ranks: every rank records the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.masking import masked_mean, masked_sum
from ..ops.stats import nan_mean, nan_std
from ..types import RewardTable
from .metrics import MetricStore


def record_rewards(store: MetricStore, table: RewardTable) -> None:
    """Record the task rewards: without clip, KL penalty or whitening.

    `frac_reward_zero_std` is the share of groups whose completions all earned the same, which
    therefore teach nothing; `frac_groups_without_baseline` the share with fewer than two
    completions that could be scored.
    """
    means, stds = nan_mean(table.per_function, dim=0), nan_std(table.per_function, dim=0)
    for name, mean, std in zip(table.names, means, stds, strict=True):
        store.value(f"rewards/{name}/mean", mean)
        store.value(f"rewards/{name}/std", std)
    store.value("reward", nan_mean(table.total))
    store.value("reward_std", nan_std(table.total))
    groups = table.total.view(-1, table.group_size)
    spread = nan_std(groups, dim=1)
    store.value("frac_reward_zero_std", (~(spread > 1e-6)).float().mean())
    scorable = (~groups.isnan()).sum(1)
    store.value("frac_groups_without_baseline", (scorable < 2).float().mean())


def record_lengths(store: MetricStore, lengths: Tensor, stopped: Tensor) -> None:
    """Record completion lengths (N,), and the share that did not end by itself."""
    lengths = lengths.float()
    kinds = {"": lengths, "terminated_": lengths[stopped]}
    for kind, values in kinds.items():
        some = values if values.numel() else torch.zeros(1, device=values.device)
        store.value(f"completions/mean_{kind}length", some.mean())
        store.value(f"completions/min_{kind}length", some.min())
        store.value(f"completions/max_{kind}length", some.max())
    store.value("completions/clipped_ratio", (~stopped).float().mean())


def record_tools(store: MetricStore, calls: Sequence[tuple[int, int]] | None) -> None:
    """Record tool calls a completion, and the share of them that failed.

    Args:
        calls: calls made by each completion of this rank, and those that failed.
    """
    if calls is None:
        return
    made, failed = sum(pair[0] for pair in calls), sum(pair[1] for pair in calls)
    store.mean("tools/call_frequency", made, len(calls))
    store.mean("tools/failure_frequency", failed, made)


def record_entropy(store: MetricStore, entropies: Tensor, mask: Tensor) -> None:
    """Record the mean entropy of trained-on tokens, in nats."""
    store.mean("entropy", masked_sum(entropies, mask), mask.sum())


def record_clipping(store: MetricStore, low: Tensor, high: Tensor, mask: Tensor) -> None:
    """Record the shares of ratios clipped from below and above.

    Args:
        low, high (`Tensor` (B, C) or (B, 1)): where the ratio is clipped.
        mask (`Tensor`, same shape): which entries count.
    """
    count = mask.sum()
    low, high = low & mask, high & mask
    store.mean("clip_ratio/low_mean", low.sum(), count)
    store.mean("clip_ratio/high_mean", high.sum(), count)
    store.mean("clip_ratio/region_mean", (low | high).sum(), count)
    rows = mask.any(1)
    shares_low = masked_mean(low.float(), mask, dim=1).masked_fill(~rows, torch.inf)
    shares_high = masked_mean(high.float(), mask, dim=1).masked_fill(~rows, -torch.inf)
    store.minimum("clip_ratio/low_min", shares_low.min())
    store.maximum("clip_ratio/high_max", shares_high.max())
