"""What a run made, and whether another that should be the same made it, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


def outcome(trainer: Any) -> dict[str, Any]:
    """Train and evaluate; then, on the first rank, the weights in one row and what was logged."""
    trainer.train()
    trainer.evaluate()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if not trainer.is_world_process_zero():
        return {}
    weights = torch.cat([state[name].flatten() for name in sorted(state)])
    return {"weights": weights, "history": trainer.state.log_history}


def check_same(
    one: dict[str, Any], two: dict[str, Any], counts: Callable[[str], bool], distance: float
) -> None:
    """Compare weights, and those of the logged numbers that count."""
    assert (one["weights"] - two["weights"]).norm() <= 1e-6 * one["weights"].norm()
    assert len(one["history"]) == len(two["history"])
    for a, b in zip(one["history"], two["history"], strict=True):
        for name in filter(counts, a):
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=distance), name
