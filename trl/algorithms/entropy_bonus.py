"""The weight of an entropy bonus, which may be steered towards a target."""

import math
from dataclasses import dataclass, field
from typing import TypedDict

import torch
from torch import Tensor

from ..distributed import Ranks
from ..online.metrics import MetricStore


class ControllerState(TypedDict):
    """What a checkpoint must hold of an `EntropyController`: JSON values."""

    coefficient: float
    measured: float | None


@dataclass(kw_only=True)
class EntropyController:
    """Raises the coefficient while the entropy is at or below its target, lowers it above."""

    coefficient: float = 0.0  # the weight of the bonus
    is_adaptive: bool = False  # otherwise the coefficient never moves
    target: float = 0.2  # in nats a token
    delta: float = 0.005  # change of the coefficient at each update
    lowest: float = 0.0  # bounds of an adaptive coefficient
    highest: float = 1.0
    measured: float | None = None  # that of the last update, of all ranks, in nats a token
    # Sum of entropies and number of tokens of each chunk of the update that is being computed.
    _observed: list[Tensor] = field(default_factory=list, init=False)

    @property
    def is_used(self) -> bool:
        """Whether there is, or may come to be, a bonus."""
        return self.is_adaptive or self.coefficient != 0.0

    @property
    def active(self) -> float:
        """Weight of the bonus: 0 if the last measured entropy is above its target, or none was."""
        if not self.is_adaptive:
            return self.coefficient
        is_low = self.measured is not None and self.measured <= self.target
        return self.coefficient if is_low else 0.0

    def discard_update(self) -> None:
        """Discard the chunks of an update that is computed again or dropped."""
        self._observed.clear()

    def observe(self, entropy_sum: Tensor, token_count: Tensor) -> None:
        """Remember the entropies of a chunk: their sum (), and how many tokens they are of."""
        self._observed.append(torch.stack([entropy_sum.detach(), token_count]))

    def end_update(self, ranks: Ranks, metrics: MetricStore) -> None:
        """Move the coefficient by the mean entropy of an update on all ranks, which all call it."""
        if not (self.is_used and self._observed):
            return
        entropy_sum, token_count = ranks.sum(torch.stack(self._observed).sum(0)).tolist()
        self._observed.clear()
        metrics.value("entropy_coef", self.active)
        if token_count:
            self.update(entropy_sum / token_count)

    def update(self, entropy: float) -> None:
        """Take the mean over the trained-on tokens of a step into account, if it is finite."""
        if not math.isfinite(entropy):
            return
        coefficient = self.coefficient
        if self.is_adaptive:
            coefficient += self.delta if entropy <= self.target else -self.delta
        self.restore({"coefficient": coefficient, "measured": entropy})

    def state(self) -> ControllerState:
        """Return what a checkpoint must hold."""
        return {"coefficient": self.coefficient, "measured": self.measured}

    def restore(self, state: ControllerState) -> None:
        """Continue from what `state` returned, within the bounds of this controller."""
        self.measured = state["measured"]
        self.coefficient = state["coefficient"]
        if self.is_adaptive:
            self.coefficient = min(max(self.coefficient, self.lowest), self.highest)
