"""The state of a training loop that its next step depends on, in checkpoints and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers.utils import logging

from ...distributed import Ranks
from ...models.reference import AdapterOff, ReferencePolicy
from ...online.buffer import Buffer
from ...online.metrics import MetricStore
from ..base.base_trainer import BaseTrainer
from ..base.phases import Phases

logger = logging.get_logger(__name__)

REFERENCE_FILE = "reference.pt"


class StatefulLoop(BaseTrainer):
    """Counts epochs and micro-steps, and continues within a round of completions.

    A checkpoint holds, for each process, the place in the data, the rollouts that later
    micro-steps train on, and the metrics and losses not yet logged; besides them the weights of a
    reference policy that moves. transformers saves the rest: weights, optimizer, schedule, random
    numbers.
    """

    ranks: Ranks
    phases: Phases
    buffer: Buffer
    reference: ReferencePolicy | None
    metrics: dict[str, MetricStore]

    def _reset_counts(self) -> None:
        self._epoch = 0
        self._step = 0  # micro-steps since the start of the epoch
        self._checkpoint: str | None = None  # that training resumes from
        self._saved: dict[str, Any] | None = None  # what it says of this loop
        self._substep = 0  # micro-steps since the last update
        self._started = 0.0  # when the first of them began

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        epochs, micro_steps = super()._init_training_state(*args)
        most_steps, _, most_epochs, checkpoint, _ = args
        self._checkpoint = checkpoint
        self._saved = None if checkpoint is None else self._load(Path(checkpoint))
        streams = isinstance(self.train_dataset, TorchIterableDataset)
        if self._saved is not None and streams and not self.args.ignore_data_skip:
            # Where the epochs of a stream end follows from no step count.
            epochs, micro_steps = self._saved["epoch"], self._saved["micro_steps"]
        if checkpoint is not None and self.state.global_step >= most_steps:
            epochs, micro_steps = most_epochs, 0  # transformers would make one step more
        self._epoch, self._step = epochs, micro_steps
        self.buffer.clear()
        self._begin_update()
        return epochs, micro_steps

    def _load(self, checkpoint: Path) -> dict[str, Any] | None:
        path = checkpoint / f"trl_state_{self.ranks.rank}.pt"
        state = _read(path) if path.exists() else None
        if state is not None and state["plan"] == list(dataclasses.astuple(self.args.batch_plan)):
            return state
        logger.warning(
            f"{checkpoint} has no state of rank {self.ranks.rank} for these batches: a round of "
            "completions in progress is generated anew."
        )
        return None

    def _restore(self) -> None:
        """Continue as the run that wrote the checkpoint would have; transformers is ready."""
        if self._checkpoint is None:
            return
        if self._saved is not None:
            self.buffer.restore(self._step, self._saved["round"], self.args.device)
            for mode, metrics in self._saved["metrics"].items():
                self.metrics[mode].load(metrics)
            self._tr_loss += self._saved["loss"].to(self.args.device)
            self._globalstep_last_logged = self._saved["last_logged"]
            # The average that `train` returns is over the steps of its own call.
            self._total_loss_scalar -= float(self.ranks.sum(self._tr_loss)) / self.ranks.count
        path = Path(self._checkpoint) / REFERENCE_FILE
        if self._moving_reference is not None and path.exists():
            self._moving_reference.load_state_dict(_read(path))
        self._saved = None

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        state = {
            "plan": list(dataclasses.astuple(self.args.batch_plan)),
            "epoch": self._epoch,
            "micro_steps": self._step,
            "round": self.buffer.state(self._step),
            "metrics": {mode: store.state() for mode, store in self.metrics.items()},
            "loss": self._tr_loss.cpu(),
            "last_logged": self._globalstep_last_logged,
        }
        torch.save(state, Path(output_dir) / f"trl_state_{self.ranks.rank}.pt")
        if self._moving_reference is not None:
            weights = self._moving_reference.state_dict()
            if self.ranks.rank == 0:
                torch.save(weights, Path(output_dir) / REFERENCE_FILE)

    @property
    def _moving_reference(self) -> Any:
        """The reference policy if `sync_ref_model` moves it."""
        moves = self.args.sync_ref_model and not isinstance(self.reference, AdapterOff)
        return self.reference if moves else None

    def _begin_update(self) -> None:
        self._substep = 0
        self.phases.begin_update()

    def _undo_update(self) -> None:
        """Forget what the micro-batches of an update have left, which then run again."""
        self.model.zero_grad()

    def _end_epoch(self, stays: bool) -> None:
        """Turn to the next epoch, unless training ends within this one."""
        if self._substep:
            logger.warning(
                f"The last {self._substep} micro-batches of the stream are not trained on: an "
                f"update takes {self.args.gradient_accumulation_steps}."
            )
            self._undo_update()
            self._begin_update()
        if not stays:
            self._epoch, self._step = self._epoch + 1, 0
            self.buffer.clear()


def _read(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)
