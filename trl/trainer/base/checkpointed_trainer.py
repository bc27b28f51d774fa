"""A trainer whose checkpoints are complete or absent, and whose resumed runs continue exactly."""

from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer

from ...distributed import Ranks
from ...models.loading import storing_adapters_only
from ...models.unwrap import is_peft_model
from ...models.weights import check_sharding
from ...online.metrics import MetricStore
from ...sources import check_upload
from ...types import Mode
from ..model_card import Method, render_model_card
from . import resuming
from .base_config import BaseConfig
from .checkpoint import (
    UNFINISHED,
    DataPosition,
    RankState,
    explained,
    publish_together,
    save_arguments,
)
from .policy import Policy
from .run_lock import RunLock


class CheckpointedTrainer(Trainer):
    """`transformers.Trainer` with atomic checkpoints, from which runs resume bit for bit."""

    method: ClassVar[Method]
    _is_saving = False  # whether a checkpoint is being written
    _chosen: str | None = None  # the checkpoint that was found intact
    _saved: tuple[str, dict[str, Any] | None] | None = None  # checkpoint that is resumed, and state
    _random_state_to_load: str | None = None  # checkpoint whose random numbers are to be restored

    def __init__(self, policy: Policy, args: BaseConfig, **options: Any):
        options |= {"model": policy.model, "processing_class": policy.tokenizer}
        super().__init__(args=args, **options)
        self.model_accepts_loss_kwargs = False
        self._had_adapter = policy.had_adapter
        check_sharding(self.model, self.accelerator)
        self.model.add_model_tags(["trl", self.method.tag])
        self.ranks = Ranks(self.accelerator, args.ranks_per_row)
        self.run_lock = RunLock(args, self.ranks)
        self.run_facts: dict[str, Any] = {}  # must be equal in a resumed run
        self.metrics: dict[Mode, MetricStore] = {"train": MetricStore(), "eval": MetricStore()}
        self.data_position = DataPosition()
        self.rank_state = RankState(self.ranks)
        for mode, store in self.metrics.items():
            self.rank_state.register(f"{mode} metrics", store.state, store.restore)
        self.rank_state.register("loss", lambda: self._tr_loss, self._restore_loss)
        self.rank_state.register(
            "last_logged",
            lambda: self._globalstep_last_logged,
            partial(setattr, self, "_globalstep_last_logged"),
        )

    def _restore_loss(self, loss: Tensor) -> None:
        self._tr_loss += loss.to(self.args.device)
        # The average that `train` returns is over the steps of its own call.
        self._total_loss_scalar -= float(self.ranks.sum(self._tr_loss)) / self.ranks.count

    def read_checkpoint(self, folder: str) -> None:
        """Read what `write_checkpoint` wrote into a folder; all ranks call this."""

    def write_checkpoint(self, folder: str) -> None:
        """Write further state that a resumed run needs; all ranks call this."""

    def drop_update(self) -> None:
        """Drop the state of an update that an error interrupted."""

    def batch_layout(self) -> list[int]:
        """Return the sizes of batches; a data position is valid only for the same sizes."""
        return [self.args.train_batch_size, self.ranks.count, self.args.gradient_accumulation_steps]

    def begin_training(self) -> None:
        """Called when training begins, before the state of a checkpoint is restored."""

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        epochs, micro_steps = super()._init_training_state(*args)
        most_steps, _, most_epochs, checkpoint, _ = args
        self._saved = None
        if checkpoint is not None:
            state = self.rank_state.read(checkpoint, self.batch_layout())
            self._saved = checkpoint, state
            streams = isinstance(self.train_dataset, IterableDataset)
            if state is not None and streams and not self.args.ignore_data_skip:
                # Where the epochs of a stream end follows from no step count.
                epochs = state["epoch"]
                micro_steps = state["micro_steps"]
            if self.state.global_step >= most_steps:
                # transformers would make one step more.
                epochs = most_epochs
                micro_steps = 0
        self.data_position = DataPosition(epochs, micro_steps)
        self.drop_update()  # an error may have interrupted one
        return epochs, micro_steps

    def _begin_training(self) -> None:
        """Continue as the run that wrote the checkpoint would have; transformers is ready."""
        self.begin_training()
        if self._saved is None:
            return
        checkpoint, state = self._saved
        self._saved = None
        self.rank_state.restore(state or {})
        self.read_checkpoint(checkpoint)
        self._random_state_to_load = checkpoint
        if self.is_world_process_zero():
            where = f"step {self.state.global_step} of {self.state.max_steps}"
            print(f"resumed from {checkpoint}: {where}, epoch {self.state.epoch:.2f}", flush=True)

    def load_random_state(self) -> None:
        """Restore the random numbers of the run that is resumed, unless that was done.

        transformers does it after it has read the first step, which is too late for rewards and
        generation.
        """
        if not self.args.ignore_data_skip:
            self._load_rng_state(self._random_state_to_load)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._random_state_to_load is not None:
            super()._load_rng_state(checkpoint)
        self._random_state_to_load = None

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.rank_state.write(output_dir, self.batch_layout(), self.data_position)
        self.write_checkpoint(output_dir)

    def find_checkpoint(self, wanted: str | bool | None = True) -> str | None:
        """Return the folder of the checkpoint `wanted`, as in `train`; all processes call this."""
        # Under FSDP1, peft would load one wrapped module without the others.
        if wanted and self.ranks.fsdp_version == 1 and is_peft_model(self.model):
            raise ValueError(
                "resume_from_checkpoint: an adapter cannot be restored under FSDP1. Train it under "
                "FSDP2 (--accelerate_config fsdp2), or begin a new run with the checkpoint as "
                "model_name_or_path."
            )
        if str(wanted) != self._chosen:
            settings = self.run_settings
            with self.run_lock:
                self._chosen = resuming.choose_checkpoint(wanted, self.args, settings, self.ranks)
        return self._chosen

    def stored_rows(self) -> Any:
        """The stored rows that are trained on, by which checkpoints know the dataset."""
        return self.train_dataset

    @cached_property
    def run_settings(self) -> dict[str, Any]:
        """The settings that the result of the run depends on: JSON values by name."""
        # Nothing wraps the model yet.
        facts = resuming.describe_options(self.args) | resuming.describe_model(self.model)
        facts |= resuming.describe_dataset(self.stored_rows()) | self.run_facts
        return {"trainer": type(self).__name__, resuming.PROCESSES: self.args.world_size} | facts

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """Write a checkpoint into a temporary folder, seal it, and move it to its final name."""
        folder = Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        staged = folder / UNFINISHED / name
        final = folder / name
        facts = {"settings": self.run_settings, "weights_only": self.args.save_only_model}
        self._is_saving = True
        try:
            with explained(staged, final):
                super()._save_checkpoint(model, trial)
                if self.state.best_model_checkpoint == str(staged):
                    self.state.best_model_checkpoint = str(final)
                    if self.args.should_save:
                        self.state.save_to_json(str(staged / "trainer_state.json"))
                best = self.state.best_model_checkpoint
                publish_together(staged, final, facts, best, self.args, self.ranks)
        finally:
            self._is_saving = False
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        folder: str | Path | None = None,
        **ignored: object,
    ) -> None:
        """Write `README.md` into a folder, by default the output folder.

        By default the model is named after the hub id or that folder; tags are the trainer's.
        """
        if self.args.process_index == 0:
            name = model_name or Path(self.args.hub_model_id or self.args.output_dir).name
            base_model = self.model.config.name_or_path
            card = render_model_card(self.method, name, base_model, dataset_name)
            card_folder = Path(folder or self.args.output_dir)
            card_folder.mkdir(parents=True, exist_ok=True)
            (card_folder / "README.md").write_text(card, encoding="utf-8")

    def push_to_hub(self, *args: object, **kwargs: object) -> Any:
        """Upload model and card; an OfflineModeIsEnabled error if the hub is switched off."""
        check_upload(self.args.output_dir)
        return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # A checkpoint that is being written will move; it is uploaded afterwards.
        if not self._is_saving:
            super()._push_from_checkpoint(checkpoint_folder)

    def _get_output_dir(self, trial: object) -> str:
        folder = super()._get_output_dir(trial)
        return str(Path(folder, UNFINISHED)) if self._is_saving else folder

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        bare = self.accelerator.unwrap_model(self.model)
        if self.args.save_on_each_node:  # newer releases of transformers write on rank 0 alone
            bare.should_save_on_this_rank = bool
        with storing_adapters_only(bare):
            super()._save(output_dir, state_dict)
        folder = output_dir or self.args.output_dir
        save_arguments(self.args, folder)
        self.create_model_card(folder=folder)  # replaces the card of peft

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        bare = self.accelerator.unwrap_model(self.model if model is None else model)
        from ...models.adapter_checkpoints import check_adapters  # only needed to resume

        check_adapters(bare, resume_from_checkpoint)
        super()._load_from_checkpoint(resume_from_checkpoint, model)
