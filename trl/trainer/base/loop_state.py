"""Where a run stands in its data, and what each process adds to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.utils import logging

from ...distributed import Ranks
from ...types import Mode

logger = logging.get_logger(__name__)

Save = Callable[[], Any]
Restore = Callable[[Any], None]


@dataclass
class Place:
    """The place of a run in its data."""

    epoch: int = 0
    micro_steps: int = 0  # since the start of the epoch
    substep: int = 0  # micro-steps since the last update
    started: float = 0.0  # when the first of them began, in seconds
    eval_batches: int = 0  # since the start of the evaluation

    def done(self, mode: Mode) -> int:
        """Micro-steps of this update, or batches of this evaluation."""
        return self.substep if mode == "train" else self.eval_batches


class RankState:
    """What the next step depends on and only this process knows, in a file for each process.

    transformers saves the rest: weights, optimizer, schedule, random numbers.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._parts: dict[str, tuple[Save, Restore]] = {}

    def register(self, name: str, save: Save, restore: Restore) -> None:
        """Add a part: `save` returns plain values and tensors, and `restore` takes them back."""
        self._parts[name] = save, restore

    def write(self, folder: str | Path, layout: list[int], place: Place) -> None:
        """Write the file of this process; under another `layout` of batches it has no meaning."""
        state = {name: save() for name, (save, _) in self._parts.items()}
        where = {"plan": layout, "epoch": place.epoch, "micro_steps": place.micro_steps}
        torch.save(where | state, self._path(folder))

    def read(self, folder: str | Path, layout: list[int]) -> dict[str, Any] | None:
        """Read what `write` wrote; None on every rank if one of them has no file for `layout`."""
        path = self._path(folder)
        state = load(path) if path.exists() else None
        fits = state is not None and state["plan"] == layout
        # Ranks that go on within a round and ranks that begin one would wait for each other.
        lacking = [rank for rank, has in enumerate(self._ranks.gather_objects(fits)) if not has]
        if not lacking:
            return state
        if self._ranks.rank == 0:
            logger.warning(
                f"{folder} has no state of rank {', '.join(map(str, lacking))} for these batch "
                "sizes: a round in progress is generated again on all ranks."
            )
        return None

    def restore(self, state: dict[str, Any]) -> None:
        """Hand each part what it saved; one that the checkpoint does not know stays as it is."""
        for name, (_, restore) in self._parts.items():
            if name in state:
                restore(state[name])

    def _path(self, folder: str | Path) -> Path:
        return Path(folder) / f"trl_state_{self._ranks.rank}.pt"


def load(path: Path) -> Any:
    """Read tensors and plain values; a file with anything else in it is refused."""
    return torch.load(path, map_location="cpu", weights_only=True)


class LoopCallback(TrainerCallback):
    """Calls functions, without arguments, at events of the loop such as `on_step_end`."""

    def __init__(self, **functions: Callable[[], None]):
        for event, function in functions.items():
            setattr(self, event, lambda *_, _function=function, **__: _function())
