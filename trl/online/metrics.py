"""Metrics as sums that know how to combine, over micro-batches and over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Gather = Callable[[Any], list[Any]]
Value: TypeAlias = float | Tensor  # () tensors stay on their device until the log


class MetricStore:
    """Collects values between two logs; ranks talk once, when the log is written.

    A metric is a weighted mean, a minimum or a maximum. Values may be tensors on any device:
    nothing is copied to the host before `flush`.
    """

    def __init__(self) -> None:
        self._means: dict[str, tuple[Value, Value]] = {}  # weighted sum, and sum of the weights
        self._extremes: dict[str, tuple[str, Value]] = {}  # "min" or "max", and the value

    def mean(self, name: str, total: Value, weight: Value = 1.0) -> None:
        """Add to a weighted mean: `total` is the weighted sum of the values added.

        With (k,) tensors for both, the metric is the sum of k weighted means.
        """
        old_total, old_weight = self._means.get(name, (0.0, 0.0))
        self._means[name] = old_total + _detached(total), old_weight + _detached(weight)

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

    def copy(self) -> MetricStore:
        """Return a store with the same values, which changes on its own."""
        copied = MetricStore()
        copied.restore(self)
        return copied

    def restore(self, copied: MetricStore) -> None:
        """Go back to what was collected when `copied` was made."""
        self._means, self._extremes = dict(copied._means), dict(copied._extremes)

    def state(self) -> dict[str, Any]:
        """Return what was collected, as numbers and tensors in main memory."""
        return {
            "means": {k: (_stored(total), _stored(n)) for k, (total, n) in self._means.items()},
            "extremes": {k: (kind, _stored(x)) for k, (kind, x) in self._extremes.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._means, self._extremes = dict(state["means"]), dict(state["extremes"])

    def flush(self, gather: Gather) -> dict[str, float | None]:
        """Combine over all ranks, forget everything, and return plain numbers.

        Args:
            gather: returns the argument of every rank in rank order, on every rank.

        Returns:
            `dict[str, float | None]`: None for a metric with nothing to measure.
        """
        every = MetricStore()
        for state in gather(self.state()):
            for name, (total, weight) in state["means"].items():
                every.mean(name, _number(total), _number(weight))
            for name, (kind, value) in state["extremes"].items():
                every._extreme(name, kind, _number(value))
        self.restore(MetricStore())
        found: dict[str, float | None] = {}
        for name, (total, weight) in every._means.items():
            total, weight = _number(total), _number(weight)
            found[name] = float((total / weight).sum()) if weight.all() else None
        for name, (_, value) in every._extremes.items():
            found[name] = float(value) if math.isfinite(value) else None
        return found

    def _extreme(self, name: str, kind: str, value: Value) -> None:
        value = _detached(value)
        if name in self._extremes:
            held = torch.as_tensor(self._extremes[name][1])
            choose = torch.minimum if kind == "min" else torch.maximum
            value = choose(held, torch.as_tensor(value, dtype=held.dtype, device=held.device))
        self._extremes[name] = (kind, value)


def _number(value: Value) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)


def _stored(value: Value) -> Value:
    return value.cpu() if isinstance(value, Tensor) else value


def _detached(value: Value) -> Value:
    return value.detach() if isinstance(value, Tensor) else value
