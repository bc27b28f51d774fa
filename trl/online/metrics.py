"""Metrics: means and extremes over micro-batches and ranks, and functions that record them."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..ops.masking import masked_mean, masked_sum, nan_mean, nan_std
from ..types import RewardTable

Gather = Callable[[Any], list[Any]]  # the argument of every rank in rank order, on every rank
Value: TypeAlias = float | Tensor  # () tensors stay on their device until the log


class MetricStore:
    """Collects values between two logs; ranks communicate once, when the log is written.

    A metric is a weighted mean, a minimum or a maximum. Tensors stay on their device until `flush`.
    """

    def __init__(self) -> None:
        self._means: dict[str, tuple[Value, Value]] = {}  # weighted sum, and sum of the weights
        self._extremes: dict[str, tuple[str, Value]] = {}  # "min" or "max", and the value

    def mean(self, name: str, total: Value, weight: Value = 1.0) -> None:
        """Add a weighted sum to a weighted mean; with (k,) tensors, to a sum of k such means."""
        old_total, old_weight = self._means.get(name, (0.0, 0.0))
        self._means[name] = _sum(old_total, total), _sum(old_weight, weight)

    def value(self, name: str, value: Value) -> None:
        """Add one observation; NaN observations (nothing to measure) do not count."""
        observed = torch.as_tensor(value, dtype=torch.float32).detach()
        missing = observed.isnan()
        self.mean(name, observed.masked_fill(missing, 0.0), (~missing).float())

    def minimum(self, name: str, value: Value) -> None:
        """Keep the lowest value."""
        self._extreme(name, "min", value)

    def maximum(self, name: str, value: Value) -> None:
        """Keep the highest value."""
        self._extreme(name, "max", value)

    def state(self) -> dict[str, dict[str, tuple[Any, Any]]]:
        """Return what was collected so far, as numbers and tensors."""
        return {"means": dict(self._means), "extremes": dict(self._extremes)}

    def restore(self, state: dict[str, dict[str, tuple[Any, Any]]]) -> None:
        """Replace all values by those of a `state`."""
        self._means = dict(state["means"])
        self._extremes = dict(state["extremes"])

    def flush(self, gather: Gather) -> dict[str, float | None]:
        """Combine all ranks, clear the store, and return numbers; None: nothing was measured."""
        means = {name: tuple(map(_number, pair)) for name, pair in self._means.items()}
        extremes = {
            name: (bound, _number(value)) for name, (bound, value) in self._extremes.items()
        }
        self.restore({"means": {}, "extremes": {}})
        all_ranks = MetricStore()
        for rank_means, rank_extremes in gather((means, extremes)):
            for name, pair in rank_means.items():
                all_ranks.mean(name, *pair)
            for name, extreme in rank_extremes.items():
                all_ranks._extreme(name, *extreme)
        numbers: dict[str, float | None] = {}
        for name, (weighted_sum, weight_sum) in all_ranks._means.items():
            total = _number(weighted_sum)
            weight = _number(weight_sum)
            numbers[name] = float((total / weight).sum()) if weight.all() else None
        for name, (_, value) in all_ranks._extremes.items():
            numbers[name] = float(value) if math.isfinite(value) else None
        return numbers

    def _extreme(self, name: str, bound: str, value: Value) -> None:
        """Keep the lower of the old and the new value if `bound` is "min", else the higher."""
        value = torch.as_tensor(value).detach()
        if name in self._extremes:
            old = torch.as_tensor(self._extremes[name][1]).to(value)
            value = torch.minimum(old, value) if bound == "min" else torch.maximum(old, value)
        self._extremes[name] = (bound, value)


def _number(value: Value) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device="cpu")


def _sum(old: Value, new: Value) -> Value:
    if isinstance(new, Tensor):
        new = new.detach()
        if isinstance(old, Tensor):
            old = old.to(new.device)  # after resuming, sums of the checkpoint are on the CPU
    return old + new


def record_rewards(store: MetricStore, table: RewardTable) -> None:
    """Record the task rewards: without clip, KL penalty or whitening."""
    means = nan_mean(table.per_function, dim=0)
    stds = nan_std(table.per_function, dim=0)
    for name, mean, std in zip(table.names, means, stds, strict=True):
        store.value(f"rewards/{name}/mean", mean)
        store.value(f"rewards/{name}/std", std)
    store.value("reward", nan_mean(table.total))
    store.value("reward_std", nan_std(table.total))
    if table.group_size == 1:
        return
    groups = table.total.view(-1, table.group_size)
    # Groups with equal rewards have no gradient; nor have groups without a baseline.
    is_flat = ~(nan_std(groups, dim=1) > 1e-6)
    store.value("frac_reward_zero_std", is_flat.float().mean())
    scorable = (~groups.isnan()).sum(1)
    store.value("frac_groups_without_baseline", (scorable < 2).float().mean())


def record_lengths(store: MetricStore, lengths: Tensor, stopped: Tensor) -> None:
    """Record completion lengths (N,), and the share of completions that were cut off."""
    lengths = lengths.float()
    for prefix, values in {"": lengths, "terminated_": lengths[stopped]}.items():
        if not values.numel():
            values = torch.zeros(1, device=values.device)
        store.value(f"completions/mean_{prefix}length", values.mean())
        store.value(f"completions/min_{prefix}length", values.min())
        store.value(f"completions/max_{prefix}length", values.max())
    store.value("completions/clipped_ratio", (~stopped).float().mean())


def record_pairs(
    store: MetricStore, logps: Tensor, log_ratios: Tensor, rewards: Tensor | None, beta: float
) -> None:
    """Record implied rewards and log-probabilities of P pairs of completions.

    `logps` (P, 2) are of the preferred completions, then of the others; `log_ratios` (P, 2) are
    `logps` minus those of the reference. `rewards` (2P,) are of the completions in any order, NaN
    where they could not be scored.
    """
    implied = (beta * log_ratios).detach()
    logps = logps.detach()
    store.value("objective/kl", log_ratios.mean())
    store.value("objective/entropy", -logps.mean())
    store.value("objective/non_score_reward", -implied.mean())
    store.value("objective/rlhf_reward", nan_mean(torch.as_tensor(rewards)) - implied.mean())
    for column, name in enumerate(("chosen", "rejected")):
        store.value(f"rewards/{name}", implied[:, column].mean())
        store.value(f"logps/{name}", logps[:, column].mean())
    margins = implied[:, 0] - implied[:, 1]
    store.value("rewards/margins", margins.mean())
    store.value("rewards/accuracies", (margins > 0).float().mean())
    store.value("beta", beta)


def record_tools(store: MetricStore, calls: Sequence[tuple[int, int]] | None) -> None:
    """Record tool calls per completion of this rank, and the share of calls that failed.

    `calls` are, for each completion, the number of calls and the number of those that failed.
    """
    if calls is None:
        return
    num_calls = sum(made for made, _ in calls)
    num_failures = sum(failed for _, failed in calls)
    store.mean("tools/call_frequency", num_calls, len(calls))
    store.mean("tools/failure_frequency", num_failures, num_calls)


def record_entropy(store: MetricStore, entropies: Tensor, mask: Tensor) -> None:
    """Record the mean entropy (B, C) of the tokens in the mask, in nats."""
    store.mean("entropy", masked_sum(entropies, mask), mask.sum())


def record_accuracy(store: MetricStore, hits: Tensor, mask: Tensor) -> None:
    """Record the share of tokens in the mask that were the model's top prediction: `hits`."""
    store.mean("mean_token_accuracy", (hits & mask).sum(), mask.sum())


def record_clipping(store: MetricStore, low: Tensor, high: Tensor, mask: Tensor) -> None:
    """Record the shares of ratios that were clipped: `low` and `high` mark them.

    All are (B, C), or (B, 1) for ratios of completions; the mask marks the ratios that count.
    """
    count = mask.sum()
    low = low & mask
    high = high & mask
    store.mean("clip_ratio/low_mean", low.sum(), count)
    store.mean("clip_ratio/high_mean", high.sum(), count)
    store.mean("clip_ratio/region_mean", (low | high).sum(), count)
    rows = mask.any(1)
    shares_low = masked_mean(low.float(), mask, dim=1).masked_fill(~rows, torch.inf)
    shares_high = masked_mean(high.float(), mask, dim=1).masked_fill(~rows, -torch.inf)
    store.minimum("clip_ratio/low_min", shares_low.min())
    store.maximum("clip_ratio/high_max", shares_high.max())


def record_sampling(
    store: MetricStore, gaps: Tensor, replayed: Tensor, log_mass: Tensor | None, mask: Tensor
) -> None:
    """Record differences between the log-probabilities of trainer and engine, in nats.

    All are (B, C): `gaps` are the differences, `replayed` those after the trainer replayed the
    engine's filters, and `log_mass` the log-probability of the tokens that filters leave, if any.
    """
    _mean_and_largest(store, "sampling/sampling_logp_difference", gaps.abs(), mask)
    if log_mass is not None:
        _mean_and_largest(store, "sampling/replayed_logp_difference", replayed.abs(), mask)
        store.mean("sampling/kept_mass", masked_sum(log_mass.exp(), mask), mask.sum())


def record_ratio(store: MetricStore, ratio: Tensor, beyond: Tensor, mask: Tensor) -> None:
    """Record the ratio (B, C) or (B, 1) of trainer to engine, and the share `beyond` bounds."""
    name = "sampling/importance_sampling_ratio"
    _mean_and_largest(store, name, ratio, mask)
    store.minimum(f"{name}/min", -_largest(-ratio, mask))
    store.mean("sampling/frac_out_of_bounds", (beyond & mask).sum(), mask.sum())


def _mean_and_largest(store: MetricStore, name: str, values: Tensor, mask: Tensor) -> None:
    store.mean(f"{name}/mean", masked_sum(values, mask), mask.sum())
    store.maximum(f"{name}/max", _largest(values, mask))


def _largest(values: Tensor, mask: Tensor) -> Tensor:
    """Return the largest value () in the mask; -infinity if the mask is empty."""
    masked = values.masked_fill(~mask, -torch.inf).flatten()
    return torch.cat([masked, values.new_full((1,), -torch.inf)]).max()
