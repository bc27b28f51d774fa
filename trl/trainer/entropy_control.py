"""A coefficient of the entropy bonus that steers towards a target entropy."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class EntropyController:
    """Raises the coefficient while the entropy is at or below its target, lowers it above.

    The bonus counts only while the last measured entropy is at or below the target, so not
    before the first measurement.

    Args:
        coefficient (`float`): weight of the bonus.
        adaptive (`bool`): whether the coefficient moves.
        target (`float`): entropy to hold, in nats a token.
        step (`float`): change of the coefficient at each update.
        low, high (`float`): bounds of the coefficient.
        measured (`float`, *optional*): entropy of the last update over all ranks.
    """

    coefficient: float
    adaptive: bool = False
    target: float = 0.2
    step: float = 0.005
    low: float = 0.0
    high: float = 1.0
    measured: float | None = None

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
        """Take the entropy of an optimizer step into account; one that is not finite is ignored.

        Args:
            entropy (`float`): mean over the trained-on tokens of all ranks, in nats.
        """
        if not math.isfinite(entropy):
            return
        self.measured = entropy
        if self.adaptive:
            moved = self.coefficient + (self.step if entropy <= self.target else -self.step)
            self.coefficient = self._bounded(moved)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {key: asdict(self)[key] for key in ("coefficient", "measured")}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned, within the bounds of this controller.

        Args:
            state (`dict`): with the keys `coefficient` and `measured`.
        """
        self.coefficient, self.measured = state["coefficient"], state["measured"]
        if self.adaptive:
            self.coefficient = self._bounded(self.coefficient)

    def _bounded(self, coefficient: float) -> float:
        return min(max(coefficient, self.low), self.high)
