"""Metrics as sums that know how to combine, over micro-batches and over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Gather = Callable[[Any], list[Any]]


@dataclass
class _Mean:
    total: Any = 0.0  # number or 0-dim tensor; tensors stay on their device until the log
    weight: Any = 0.0

    def merge(self, total: Any, weight: Any) -> None:
        self.total = self.total + total
        self.weight = self.weight + weight


@dataclass
class MetricStore:
    """Collects values between two logs; ranks talk once, when the log is written.

    A metric is a weighted mean, a minimum or a maximum. Values may be tensors on any device:
    nothing is copied to the host before `flush`.
    """

    _means: dict[str, _Mean] = field(default_factory=dict)
    _extremes: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def mean(self, name: str, total: float | Tensor, weight: float | Tensor = 1.0) -> None:
        """Add to a weighted mean: `total` is the weighted sum of the values added."""
        self._means.setdefault(name, _Mean()).merge(_detached(total), _detached(weight))

    def value(self, name: str, value: float | Tensor) -> None:
        """Add one observation; NaN observations (nothing to measure) do not count."""
        observed = torch.as_tensor(value, dtype=torch.float32).detach()
        missing = observed.isnan()
        self.mean(name, observed.masked_fill(missing, 0.0), (~missing).float())

    def minimum(self, name: str, value: float | Tensor) -> None:
        """Keep the lowest value."""
        self._extreme(name, "min", value)

    def maximum(self, name: str, value: float | Tensor) -> None:
        """Keep the highest value."""
        self._extreme(name, "max", value)

    def copy(self) -> MetricStore:
        """Return a store with the same values, which changes on its own."""
        means = {name: _Mean(mean.total, mean.weight) for name, mean in self._means.items()}
        return MetricStore(means, dict(self._extremes))

    def restore(self, copied: MetricStore) -> None:
        """Go back to what was collected when `copied` was made."""
        again = copied.copy()
        self._means, self._extremes = again._means, again._extremes

    def state(self) -> dict[str, Any]:
        """Return what was collected, as numbers and tensors in main memory."""
        means = {name: (_stored(m.total), _stored(m.weight)) for name, m in self._means.items()}
        extremes = {name: (kind, _stored(x)) for name, (kind, x) in self._extremes.items()}
        return {"means": means, "extremes": extremes}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._means = {name: _Mean(*pair) for name, pair in state["means"].items()}
        self._extremes = dict(state["extremes"])

    def flush(self, gather: Gather) -> dict[str, float | None]:
        """Combine over all ranks, forget everything, and return plain numbers.

        Args:
            gather: returns the argument of every rank in rank order, on every rank.

        Returns:
            `dict[str, float | None]`: None for a metric with nothing to measure.
        """
        local = {
            "means": {k: (float(m.total), float(m.weight)) for k, m in self._means.items()},
            "extremes": {k: (kind, float(v)) for k, (kind, v) in self._extremes.items()},
        }
        self._means, self._extremes = {}, {}
        return _combine(gather(local))

    def _extreme(self, name: str, kind: str, value: float | Tensor) -> None:
        value = _detached(value)
        if name in self._extremes:
            held = torch.as_tensor(self._extremes[name][1])
            choose = torch.minimum if kind == "min" else torch.maximum
            value = choose(held, torch.as_tensor(value, dtype=held.dtype, device=held.device))
        self._extremes[name] = (kind, value)


def _stored(value: float | Tensor) -> float | Tensor:
    return value.cpu() if isinstance(value, Tensor) else value


def _detached(value: float | Tensor) -> float | Tensor:
    return value.detach() if isinstance(value, Tensor) else value


def _combine(ranks: list[dict[str, Any]]) -> dict[str, float | None]:
    means: dict[str, _Mean] = {}
    extremes: dict[str, float] = {}
    for rank in ranks:
        for name, (total, weight) in rank["means"].items():
            means.setdefault(name, _Mean()).merge(total, weight)
        for name, (kind, value) in rank["extremes"].items():
            choose = min if kind == "min" else max
            extremes[name] = choose(extremes.get(name, value), value)
    found = {
        name: mean.total / mean.weight if mean.weight else None for name, mean in means.items()
    }
    return found | {name: x if math.isfinite(x) else None for name, x in extremes.items()}
