"""A coefficient of the entropy bonus that steers towards a target entropy."""

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class EntropyController:
    """Raises the coefficient while the entropy is at or below its target, lowers it above.

    Where the last measured entropy is above it, or none was measured, the bonus does not count.
    """

    args: Any  # a `GRPOConfig`
    coefficient: float = field(init=False)  # weight of the bonus
    measured: float | None = None  # entropy of the last update over all ranks, in nats a token

    def __post_init__(self) -> None:
        self.coefficient = self.args.entropy_coef

    @property
    def is_used(self) -> bool:
        """Whether there is, or may come to be, a bonus."""
        return self.args.use_adaptive_entropy or self.coefficient != 0.0

    @property
    def active(self) -> float:
        """Weight of the bonus now."""
        if not self.args.use_adaptive_entropy:
            return self.coefficient
        below = self.measured is not None and self.measured <= self.args.entropy_target
        return self.coefficient if below else 0.0

    def update(self, entropy: float) -> None:
        """Take the mean over the trained-on tokens of a step into account, if it is finite."""
        step = self.args.entropy_coef_delta * self.args.use_adaptive_entropy
        change = step if entropy <= self.args.entropy_target else -step
        if math.isfinite(entropy):
            self.restore({"coefficient": self.coefficient + change, "measured": entropy})

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {"coefficient": self.coefficient, "measured": self.measured}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned, within the bounds of this controller."""
        self.measured, wanted = state["measured"], state["coefficient"]
        if self.args.use_adaptive_entropy:
            wanted = min(max(wanted, self.args.entropy_coef_min), self.args.entropy_coef_max)
        self.coefficient = wanted
