"""Where a run stands in its data, and what each process adds to a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState, TrainingArguments
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

    def begin_micro_step(self) -> None:
        """Note when an update begins."""
        if self.substep == 0:
            self.started = time.perf_counter()

    def end_micro_step(self) -> None:
        """Count a micro-step."""
        self.micro_steps += 1
        self.substep += 1

    def seconds(self) -> float:
        """Since the update began."""
        return time.perf_counter() - self.started

    def round_number(self, mode: Mode, period: int) -> int:
        """Number of what is prepared now among that of this update, or this evaluation.

        Args:
            mode (`str`): "train" or "eval".
            period (`int`): micro-steps that are prepared at once in training.
        """
        return self.eval_batches if mode == "eval" else self.substep // period

    def begin_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        self.epoch, self.micro_steps = epoch, 0


class RankState:
    """What the next step depends on and only this process knows, in a file for each process.

    transformers saves the rest: weights, optimizer, schedule, random numbers.

    Args:
        ranks (`Ranks`): all processes.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._parts: dict[str, tuple[Save, Restore]] = {}

    def register(self, name: str, save: Save, restore: Restore) -> None:
        """Add a part.

        Args:
            name (`str`): of the part in the file.
            save: returns numbers, strings, containers and tensors.
            restore: takes what `save` returned, when everything is ready for the next step.
        """
        self._parts[name] = save, restore

    def write(self, folder: str | Path, layout: list[int], place: Place) -> None:
        """Write the file of this process.

        Args:
            folder: of the checkpoint.
            layout: the sizes of batches; under others the state has no meaning.
            place (`Place`): in the data.
        """
        state = {name: save() for name, (save, _) in self._parts.items()}
        where = {"plan": layout, "epoch": place.epoch, "micro_steps": place.micro_steps}
        torch.save(where | state, self._path(folder))

    def read(self, folder: str | Path, layout: list[int]) -> dict[str, Any] | None:
        """Read what `write` wrote; None on every rank if one of them has no file for `layout`.

        The ranks decide together: those that go on within a round and those that begin one would
        wait for each other.
        """
        path = self._path(folder)
        state = load(path) if path.exists() else None
        fits = state is not None and state["plan"] == layout
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


def logs_at(args: TrainingArguments, state: TrainerState, step: int) -> bool:
    """Whether metrics are logged after update `step`."""
    if args.logging_strategy == "epoch":
        return True
    first = args.logging_first_step and step == 1
    return args.logging_strategy == "steps" and (
        first or step % max(1, int(state.logging_steps)) == 0
    )


def load(path: Path) -> Any:
    """Read tensors and plain values; a file with anything else in it is refused."""
    return torch.load(path, map_location="cpu", weights_only=True)


class LoopCallback(TrainerCallback):
    """Calls functions, without arguments, at events of the loop of transformers.

    Args:
        functions: by the names of the events, such as `on_step_end`.
    """

    def __init__(self, **functions: Callable[[], None]):
        for event, function in functions.items():
            setattr(self, event, lambda *_, _function=function, **__: _function())
