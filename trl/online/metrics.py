"""Metrics: sums that know how to combine over micro-batches and ranks, and what is recorded."""

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
    """Collects values between two logs; ranks talk once, when the log is written.

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
        """Go back to what had been collected when `state` returned this."""
        self._means, self._extremes = dict(state["means"]), dict(state["extremes"])

    def flush(self, gather: Gather) -> dict[str, float | None]:
        """Combine over all ranks, forget everything, and return numbers; None: nothing measured."""
        means = {name: tuple(map(_number, pair)) for name, pair in self._means.items()}
        extremes = {name: (kind, _number(x)) for name, (kind, x) in self._extremes.items()}
        self.restore({"means": {}, "extremes": {}})
        every = MetricStore()
        for rank_means, rank_extremes in gather((means, extremes)):
            for name, pair in rank_means.items():
                every.mean(name, *pair)
            for name, extreme in rank_extremes.items():
                every._extreme(name, *extreme)
        found: dict[str, float | None] = {}
        for name, (total, weight) in every._means.items():
            total, weight = _number(total), _number(weight)
            found[name] = float((total / weight).sum()) if weight.all() else None
        for name, (_, value) in every._extremes.items():
            found[name] = float(value) if math.isfinite(value) else None
        return found

    def _extreme(self, name: str, kind: str, value: Value) -> None:
        value = torch.as_tensor(value).detach()
        if name in self._extremes:
            held = torch.as_tensor(self._extremes[name][1]).to(value)
            value = torch.minimum(held, value) if kind == "min" else torch.maximum(held, value)
        self._extremes[name] = (kind, value)


def _number(value: Value) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device="cpu")


def _sum(held: Value, new: Value) -> Value:
    if isinstance(new, Tensor):
        new = new.detach()
        if isinstance(held, Tensor):
            held = held.to(new.device)  # what a checkpoint held is on the CPU
    return held + new


def record_rewards(store: MetricStore, table: RewardTable) -> None:
    """Record the task rewards: without clip, KL penalty or whitening."""
    means, stds = nan_mean(table.per_function, dim=0), nan_std(table.per_function, dim=0)
    for name, mean, std in zip(table.names, means, stds, strict=True):
        store.value(f"rewards/{name}/mean", mean)
        store.value(f"rewards/{name}/std", std)
    store.value("reward", nan_mean(table.total))
    store.value("reward_std", nan_std(table.total))
    if table.group_size == 1:
        return
    groups = table.total.view(-1, table.group_size)
    # Groups whose completions all earned the same teach nothing, as those that have no baseline.
    is_flat = ~(nan_std(groups, dim=1) > 1e-6)
    store.value("frac_reward_zero_std", is_flat.float().mean())
    scorable = (~groups.isnan()).sum(1)
    store.value("frac_groups_without_baseline", (scorable < 2).float().mean())


def record_lengths(store: MetricStore, lengths: Tensor, stopped: Tensor) -> None:
    """Record completion lengths (N,), and the share that did not end on its own."""
    lengths = lengths.float()
    for kind, values in {"": lengths, "terminated_": lengths[stopped]}.items():
        some = values if values.numel() else torch.zeros(1, device=values.device)
        for name, summary in {"mean": some.mean(), "min": some.min(), "max": some.max()}.items():
            store.value(f"completions/{name}_{kind}length", summary)
    store.value("completions/clipped_ratio", (~stopped).float().mean())


def record_pairs(
    store: MetricStore, logps: Tensor, log_ratios: Tensor, rewards: Tensor | None, beta: float
) -> None:
    """Record what the policy makes of preferred completions (first) and of the others.

    `log_ratios` say how much larger the `logps` (P, 2) of P pairs are than those of the reference;
    `rewards` (2P,) are of the completions in any order, NaN where they could not be scored.
    """
    implied, logps = (beta * log_ratios).detach(), logps.detach()
    store.value("objective/kl", log_ratios.mean())
    store.value("objective/entropy", -logps.mean())
    store.value("objective/non_score_reward", -implied.mean())
    store.value("objective/rlhf_reward", nan_mean(torch.as_tensor(rewards)) - implied.mean())
    for place, name in enumerate(("chosen", "rejected")):
        store.value(f"rewards/{name}", implied[:, place].mean())
        store.value(f"logps/{name}", logps[:, place].mean())
    margins = implied[:, 0] - implied[:, 1]
    store.value("rewards/margins", margins.mean())
    store.value("rewards/accuracies", (margins > 0).float().mean())
    store.value("beta", beta)


def record_tools(store: MetricStore, calls: Sequence[tuple[int, int]] | None) -> None:
    """Record how often completions of this rank called tools, and the share that failed."""
    if calls is None:
        return
    made, failed = sum(pair[0] for pair in calls), sum(pair[1] for pair in calls)
    store.mean("tools/call_frequency", made, len(calls))
    store.mean("tools/failure_frequency", failed, made)


def record_entropy(store: MetricStore, entropies: Tensor, mask: Tensor) -> None:
    """Record the mean entropy of trained-on tokens, in nats."""
    store.mean("entropy", masked_sum(entropies, mask), mask.sum())


def record_accuracy(store: MetricStore, hits: Tensor, mask: Tensor) -> None:
    """Record the share of trained-on tokens that no token was likelier than."""
    store.mean("mean_token_accuracy", (hits & mask).sum(), mask.sum())


def record_clipping(store: MetricStore, low: Tensor, high: Tensor, mask: Tensor) -> None:
    """Record the shares of ratios clipped `low` and `high`, (B, C) or (B, 1) as the mask is."""
    count, low, high = mask.sum(), low & mask, high & mask
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
    """Record how far the log-probabilities of trainer and engine are apart, in nats.

    All are (B, C): the differences, the same after replaying the filters of the engine, and the
    log-probability of what these leave, if there are any.
    """
    _mean_and_largest(store, "sampling/sampling_logp_difference", gaps.abs(), mask)
    if log_mass is not None:
        _mean_and_largest(store, "sampling/replayed_logp_difference", replayed.abs(), mask)
        store.mean("sampling/kept_mass", masked_sum(log_mass.exp(), mask), mask.sum())


def record_ratio(store: MetricStore, ratio: Tensor, beyond: Tensor, mask: Tensor) -> None:
    """Record the ratio (B, C) or (B, 1) of trainer to engine, and which are `beyond` bounds."""
    name = "sampling/importance_sampling_ratio"
    _mean_and_largest(store, name, ratio, mask)
    store.minimum(f"{name}/min", -_largest(-ratio, mask))
    store.mean("sampling/frac_out_of_bounds", (beyond & mask).sum(), mask.sum())


def _mean_and_largest(store: MetricStore, name: str, values: Tensor, mask: Tensor) -> None:
    store.mean(f"{name}/mean", masked_sum(values, mask), mask.sum())
    store.maximum(f"{name}/max", _largest(values, mask))


def _largest(values: Tensor, mask: Tensor) -> Tensor:
    counted = values.masked_fill(~mask, -torch.inf).flatten()
    return torch.cat([counted, values.new_full((1,), -torch.inf)]).max()
