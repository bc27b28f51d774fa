"""A coefficient of the entropy bonus that steers towards a target entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass
class EntropyController:
    """Raises the coefficient while the entropy is at or below its target, lowers it above.

    The bonus counts only while the last measured entropy is at or below the target, so not
    before the first measurement.
    """

    coefficient: float  # weight of the bonus
    adaptive: bool = False  # whether it moves
    target: float = 0.2  # entropy to hold, in nats a token
    step: float = 0.005  # change of the coefficient at each update
    low: float = 0.0
    high: float = 1.0
    measured: float | None = None  # entropy of the last update over all ranks

    @classmethod
    def from_args(cls, args: Any) -> EntropyController:
        """Read the options of a `GRPOConfig`."""
        return cls(
            coefficient=args.entropy_coef,
            adaptive=args.use_adaptive_entropy,
            target=args.entropy_target,
            step=args.entropy_coef_delta,
            low=args.entropy_coef_min,
            high=args.entropy_coef_max,
        )

    @property
    def is_used(self) -> bool:
        """Whether there is, or may come to be, a bonus."""
        return self.adaptive or self.coefficient != 0.0

    @property
    def active(self) -> float:
        """Weight of the bonus now."""
        if not self.adaptive:
            return self.coefficient
        below = self.measured is not None and self.measured <= self.target
        return self.coefficient if below else 0.0

    def update(self, entropy: float) -> None:
        """Take the mean over the trained-on tokens of a step into account, if it is finite."""
        if not math.isfinite(entropy):
            return
        self.measured = entropy
        if self.adaptive:
            self._move(self.step if entropy <= self.target else -self.step)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {"coefficient": self.coefficient, "measured": self.measured}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned, within the bounds of this controller."""
        self.coefficient, self.measured = state["coefficient"], state["measured"]
        if self.adaptive:
            self._move(0.0)

    def _move(self, change: float) -> None:
        self.coefficient = min(max(self.coefficient + change, self.low), self.high)
