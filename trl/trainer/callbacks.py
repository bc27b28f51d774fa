"""Callbacks for any `transformers.Trainer`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..distributed import fsdp_version
from ..imports import require
from ..models.reference import frozen_pairs
from ..models.shards import local_shard, release


class SyncRefModelCallback(TrainerCallback):
    """Moves a reference model towards the policy every so many optimizer steps (TR-DPO).

    reference <- alpha * policy + (1 - alpha) * reference, with `alpha` from
    `args.ref_model_mixup_alpha`, whenever `global_step` is a multiple of
    `args.ref_model_sync_steps` (arXiv 2404.09656).

    Args:
        ref_model (`nn.Module`): the reference; changed in place.
        accelerator (`Accelerator`): unwraps the policy.
    """

    def __init__(self, ref_model: nn.Module, accelerator: Accelerator):
        self.ref_model = ref_model
        self.accelerator = accelerator

    @torch.no_grad()
    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Blend the weights if a sync is due."""
        if state.global_step % args.ref_model_sync_steps:
            return
        # Both are sharded alike, so each rank blends its own parts.
        for model in (kwargs["model"], self.ref_model):
            release(model)
        for parameter, source in self._pairs(self.accelerator.unwrap_model(kwargs["model"])):
            target, wanted = local_shard(parameter), local_shard(source)
            target.lerp_(wanted.to(target.device, target.dtype), args.ref_model_mixup_alpha)

    def _pairs(self, policy: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Each weight of the reference, with that of the policy."""
        weights = dict(policy.named_parameters())
        reference = self.accelerator.unwrap_model(self.ref_model)
        for name, parameter in reference.named_parameters():
            yield parameter, weights[name]


class SyncRefAdapterCallback(SyncRefModelCallback):
    """The same where the reference is a frozen copy of an adapter, which is part of the policy.

    The factors of the adapters are blended, not the changes of weights that they stand for.

    Raises:
        ValueError: under FSDP1, which cuts trained and frozen weights at different places.
    """

    def __init__(self, ref_model: nn.Module, accelerator: Accelerator):
        super().__init__(ref_model, accelerator)
        if fsdp_version(accelerator) == 1:
            raise ValueError(
                "sync_ref_model=True: FSDP1 divides the copy of an adapter in another way than the "
                "adapter, so the copy cannot follow it. Train under FSDP2 (--accelerate_config "
                "fsdp2) or ZeRO-3 (--accelerate_config zero3), or leave the option out."
            )

    def _pairs(self, policy: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return frozen_pairs(policy)


class RichProgressCallback(TrainerCallback):
    """Shows training and evaluation as rich bars with remaining time, and the latest metrics.

    Raises:
        ImportError: if rich is not installed.
    """

    def __init__(self) -> None:
        self._progress = require("rich.progress", "RichProgressCallback")
        self._console = require("rich.console", "RichProgressCallback").Console()
        self._bars: Any = None
        self._training: Any = None
        self._evaluation: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the training bar on the main process."""
        if not state.is_world_process_zero:
            return
        self._open()
        self._training = self._bars.add_task("training", total=state.max_steps, note="")
        self._bars.update(self._training, completed=state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Advance the training bar."""
        if self._training is not None:
            self._bars.update(self._training, completed=state.global_step)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Advance the evaluation bar, opening it at the first batch."""
        if not state.is_world_process_zero:
            return
        if self._evaluation is None:
            self._open()
            loader: Any = kwargs.get("eval_dataloader")
            total = len(loader) if hasattr(loader, "__len__") else None
            self._evaluation = self._bars.add_task("evaluation", total=total, note="")
        self._bars.advance(self._evaluation)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the evaluation bar."""
        if self._evaluation is not None:
            self._bars.remove_task(self._evaluation)
            self._evaluation = None
            self._close_if_idle()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show reward, loss and length beside the bar."""
        if self._training is None or not logs:
            return
        shown = {"reward": "reward", "loss": "loss", "length": "completions/mean_length"}
        words = [f"{word} {logs[key]:.3g}" for word, key in shown.items() if logs.get(key)]
        if words:
            self._bars.update(self._training, note="  ".join(words))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the bars."""
        self._training = None
        self._close_if_idle()

    def _open(self) -> None:
        if self._bars is None:
            p = self._progress
            self._bars = p.Progress(
                p.TextColumn("{task.description}"),
                p.BarColumn(),
                p.MofNCompleteColumn(),
                p.TimeElapsedColumn(),
                p.TextColumn("ETA"),
                p.TimeRemainingColumn(),
                p.TextColumn("{task.fields[note]}"),
                console=self._console,
            )
            self._bars.start()

    def _close_if_idle(self) -> None:
        if self._bars is not None and self._training is None and self._evaluation is None:
            self._bars.stop()
            self._bars = None
