"""Callbacks for any `transformers.Trainer`."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from ..distributed import Ranks
from ..imports import lazy_exports
from ..json_files import JsonLinesFile, json_text
from ..models import reference as references
from ..models.sharded import is_sharded, local_shard, release
from ..redaction import redact
from .base.checkpoint import load

__getattr__ = lazy_exports("trl.trainer")  # the callbacks that are in files of their own
logger = logging.get_logger(__name__)
REFERENCE_FILE = "reference.pt"


@dataclass(eq=False)
class SyncRefModelCallback(TrainerCallback):
    """Moves a reference model towards the policy every few optimizer steps (TR-DPO).

    reference <- alpha * policy + (1 - alpha) * reference, with `alpha` from
    `args.ref_model_mixup_alpha`, whenever `global_step` is a multiple of
    `args.ref_model_sync_steps` (arXiv 2404.09656).
    """

    ref_model: nn.Module  # changed in place
    accelerator: Accelerator  # unwraps the policy

    @torch.no_grad()
    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        **kwargs: object,
    ) -> None:
        """Blend the weights if a sync is due."""
        if state.global_step % args.ref_model_sync_steps:
            return
        # Both models are sharded in the same way, so each rank blends its own shards.
        for sharded_model in (model, self.ref_model):
            release(sharded_model)
        for parameter, source in self._pairs(self.accelerator.unwrap_model(model)):
            target = local_shard(parameter)
            policy_shard = local_shard(source).to(target.device, target.dtype)
            target.lerp_(policy_shard, args.ref_model_mixup_alpha)

    def _pairs(self, policy: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        weights = dict(policy.named_parameters())
        for name, parameter in self.accelerator.unwrap_model(self.ref_model).named_parameters():
            yield parameter, weights[name]


class MovingReference(SyncRefModelCallback):
    """Moves the reference towards the policy (`sync_ref_model`), and saves it in checkpoints."""

    def __init__(self, reference: references.ReferencePolicy, accelerator: Accelerator):
        super().__init__(reference.model, accelerator)
        # The copy of an adapter is part of the policy, and so of its checkpoints.
        self._is_copy = isinstance(reference, references.FrozenCopy)
        if isinstance(reference, references.AdapterOff) and reference.adapter is None:
            raise NotImplementedError(
                "sync_ref_model=True: the reference is the base model, which has no weights of its "
                "own that could move. Leave the option out, or pass a model that already has an "
                "adapter: its reference is a copy of that."
            )
        if not self._is_copy and Ranks(accelerator).fsdp_version == 1:
            raise ValueError(
                "sync_ref_model=True: FSDP1 divides the copy of an adapter in another way than the "
                "adapter, so the copy cannot follow it. Train under FSDP2 (--accelerate_config "
                "fsdp2) or ZeRO-3 (--accelerate_config zero3), or leave the option out."
            )

    def _pairs(self, policy: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        # Of adapters, the factors are averaged, not their products.
        return super()._pairs(policy) if self._is_copy else references.frozen_pairs(policy)

    def write(self, folder: str | Path, writes: bool, on_each_node: bool = False) -> None:
        """Write the weights to a checkpoint; every rank calls this, because all take part.

        Args:
            folder: the folder of the checkpoint.
            writes: whether this rank writes the file. It then holds all weights in memory; other
                ranks hold one at a time.
            on_each_node: whether one rank of each node writes, instead of rank 0 alone.
        """
        if not self._is_copy:
            return
        weights = {}
        for name, weight in references.whole_weights(self.ref_model, on_first=not on_each_node):
            if writes:
                weights[name] = weight
        if writes:
            torch.save(weights, Path(folder) / REFERENCE_FILE)

    def read(self, folder: str | Path, ranks: Ranks) -> None:
        """Load the weights that `write` wrote, if every rank finds the file."""
        path = Path(folder) / REFERENCE_FILE
        if not self._is_copy:
            return
        if ranks.all(path.exists()):
            references.load_weights(self.ref_model, load(path, in_place=True))
        elif ranks.rank == 0:
            logger.warning(
                f"{folder} has no {REFERENCE_FILE}: the reference starts from the policy."
            )


@dataclass(eq=False)
class BEMACallback(TrainerCallback):
    """Keeps a corrected moving average of the weights, saved to `<output_dir>/bema` at the end.

    At step t (arXiv 2508.00180) the average moves by beta_t = max((lag + multiplier t)^-ema_power,
    min_ema_multiplier), and the weights that are saved are

        average + (lag + multiplier t)^-bias_power (weights - first weights)

    Weights that are not trained stay as they are. A resumed run begins a new average. Weights that
    are sharded over ranks are refused when training begins.
    """

    update_freq: int = 400  # steps between two updates
    ema_power: float = 0.5  # 0 takes the weights of the step as their average
    bias_power: float = 0.2  # 0 corrects in full
    lag: int = 10  # how slowly it begins
    update_after: int = 0  # the step whose weights are the first
    multiplier: float = 1.0  # how steps count
    min_ema_multiplier: float = 0.0  # least beta
    device: str = "cpu"  # where the copy lives
    running_model: Any = field(default=None, init=False)
    _first: dict[str, Tensor] = field(default_factory=dict, init=False)
    _average: dict[str, Tensor] = field(default_factory=dict, init=False)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        **kwargs: object,
    ) -> None:
        """Copy the model."""
        if is_sharded(model):
            raise ValueError(
                "BEMACallback needs the weights as a whole: train without FSDP and ZeRO-3."
            )
        self.running_model = copy.deepcopy(model).to(self.device).eval()
        self._begin(model)

    @torch.no_grad()
    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        **kwargs: object,
    ) -> None:
        """Move the average if an update is due."""
        past = state.global_step - self.update_after
        if past == 0:
            self._begin(model)
        elif past > 0 and past % self.update_freq == 0:
            time = self.lag + self.multiplier * state.global_step
            beta = max(time**-self.ema_power, self.min_ema_multiplier)
            running = dict(self.running_model.named_parameters())
            for name, weight in self._weights(model).items():
                average = self._average[name].lerp_(weight, beta)
                running[name].copy_(average + time**-self.bias_power * (weight - self._first[name]))

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Save the corrected average."""
        if state.is_world_process_zero:
            self.running_model.save_pretrained(Path(args.output_dir, "bema"))

    def _begin(self, model: nn.Module) -> None:
        self._first = self._weights(model)
        self._average = {name: weight.clone() for name, weight in self._first.items()}

    def _weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Copies of the trained weights, in float32 at least."""
        trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        copies = {}
        for name, weight in trained.items():
            dtype = torch.promote_types(weight.dtype, torch.float32)
            copies[name] = weight.to(self.device, dtype, copy=True)
        return copies


@dataclass(eq=False)
class RunRecord(TrainerCallback):
    """Writes `run.json` and `metrics.jsonl` into the output folder, for `trl report`."""

    trainer: str  # the name of the method

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        **kwargs: object,
    ) -> None:
        """Write the settings, and drop lines of steps after the one that the run resumes from."""
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        config = getattr(model, "config", None)
        record = {
            "trainer": self.trainer,
            "model": getattr(config, "name_or_path", ""),
            "processes": args.world_size,
            "options": args.to_dict(),
        }
        if (quantization := getattr(config, "quantization_config", None)) is not None:
            record["quantization"] = quantization.to_dict()
        text = json_text(redact(record), indent=1)
        (folder / "run.json").write_text(text, encoding="utf-8")
        JsonLinesFile(folder / "metrics.jsonl").drop_after(state.global_step or -1)  # -1: a new run

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Append what was logged, with its step."""
        if state.is_world_process_zero and state.log_history:
            JsonLinesFile(Path(args.output_dir) / "metrics.jsonl").add(state.log_history[-1:])
