"""What every trainer of this package adds to `transformers.Trainer`: safe checkpoints, model card.

The hub is left alone when it is switched off.
"""

from __future__ import annotations

import os
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub import constants as hub
from safetensors import SafetensorError
from transformers import Trainer
from transformers.utils import logging

from ...distributed import Ranks
from ...imports import beyond_tested
from ...models.adapter_checkpoint import check_adapters, storing_adapters_only
from ..callbacks import close_progress
from .checkpoint import UNFINISHED, checkpoints_in, publish, rotate, seal
from .model_card import Method, render_model_card
from .resuming import check_engine, choose_checkpoint
from .run_settings import PROCESSES, describe_dataset, describe_model, describe_options

logger = logging.get_logger(__name__)


class BaseTrainer(Trainer):
    """A `transformers.Trainer` with complete checkpoints and a model card, silent offline."""

    method: ClassVar[Method]
    _is_saving = False
    _chosen: str | None = None  # the checkpoint that was found intact

    def __init__(self, *args: Any, **kwargs: Any):
        warning = beyond_tested("transformers")
        if warning is not None:
            logger.warning_once(warning)
        super().__init__(*args, **kwargs)

    # --- Resuming ---

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `transformers.Trainer` does, from the start or an intact checkpoint.

        Args:
            resume_from_checkpoint (`bool` or `str`, *optional*): True for the newest intact
                checkpoint in the output folder, or the path of one.

        Raises:
            ValueError: as `find_checkpoint`.
        """
        found = self.find_checkpoint(resume_from_checkpoint)
        earlier = checkpoints_in(self.args.output_dir)
        if found is None and earlier and self.is_world_process_zero():
            logger.warning(
                f"{self.args.output_dir} has {earlier[0].name} of an earlier run, which this run "
                "begins over. To go on with it, set resume_from_checkpoint=True; to keep the runs "
                "apart, choose another output_dir."
            )
        try:
            return super().train(found, *args, **kwargs)
        finally:
            close_progress(self.callback_handler.callbacks)

    def find_checkpoint(self, wanted: Any = True) -> str | None:
        """Choose the checkpoint to resume from. All processes must call this.

        Args:
            wanted (`bool` or `str`, *optional*): as in `train`.

        Returns:
            `str`: the folder; None if nothing is to be resumed.

        Raises:
            ValueError: if there is no checkpoint, the named one is damaged, or the settings are
                not those of the run that wrote it and `resume_with_changes` is not set; and for an
                adapter under FSDP1.
        """
        if wanted:
            check_engine(self.model, self.accelerator)
        if self._chosen is not None and str(wanted) == self._chosen:
            return self._chosen
        ranks = Ranks(self.accelerator)
        found: tuple[str | None, str | None] = (None, None)
        if ranks.rank == 0:
            found = choose_checkpoint(wanted, self.args, self.run_settings)
        self._chosen, problem = ranks.gather_objects(found)[0]
        if problem is not None:
            raise ValueError(problem)
        return self._chosen

    @cached_property
    def run_settings(self) -> dict[str, Any]:
        """What the outcome of the run depends on, by name: JSON values, read before training."""
        return self.describe_run()

    def describe_run(self) -> dict[str, Any]:
        """Collect the settings that a resumed run must share."""
        return {
            "trainer": type(self).__name__,
            PROCESSES: self.args.world_size,
            **describe_options(self.args),
            **describe_dataset(self.train_dataset),
            **describe_model(self.model),
        }

    # --- Saving ---

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint aside, seal it, and give it its name when it is complete."""
        folder = Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        staged, final = folder / UNFINISHED / name, folder / name
        self._is_saving = True
        try:
            self._write_card(str(staged))
            super()._save_checkpoint(model, trial)
            self._name_best(staged, final)
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                facts = {"settings": self.run_settings, "weights_only": self.args.save_only_model}
                seal(staged, facts)
                publish(staged, final)
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(staged, ignore_errors=True)
            raise OSError(_not_saved(final, error)) from error
        finally:
            self._is_saving = False
        if self.is_world_process_zero():
            best = self.state.best_model_checkpoint
            keep = [final, Path(best)] if best else [final]
            rotate(folder, self.args.save_total_limit, keep)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, UNFINISHED) if self._is_saving else folder

    def _name_best(self, staged: Path, final: Path) -> None:
        """Record the best checkpoint under its name, if it is the one being written."""
        if self.state.best_model_checkpoint != str(staged):
            return
        self.state.best_model_checkpoint = str(final)
        if self.args.should_save:
            self.state.save_to_json(str(staged / "trainer_state.json"))

    # --- Adapters ---

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        with storing_adapters_only(self.accelerator.unwrap_model(self.model)):
            super()._save(output_dir, state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        bare = self.accelerator.unwrap_model(self.model if model is None else model)
        check_adapters(bare, resume_from_checkpoint)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    # --- Model card ---

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        **ignored: Any,
    ) -> None:
        """Write `README.md` into the output folder.

        Args:
            model_name (`str`, *optional*): defaults to the hub id or the folder's name.
            dataset_name (`str`, *optional*): what was trained on.
            tags (*optional*): accepted for compatibility; the trainer's own tags are written.
        """
        self._write_card(self.args.output_dir, model_name, dataset_name)

    def _write_card(
        self, folder: str, model_name: str | None = None, dataset_name: str | None = None
    ) -> None:
        if not self.is_world_process_zero():
            return
        source = self.args.hub_model_id or self.args.output_dir
        card = render_model_card(
            self.method,
            model_name or Path(source).name,
            self.model.config._name_or_path or None,
            dataset_name,
        )
        path = Path(folder) / "README.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(card, encoding="utf-8")

    # --- Hub ---

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Create the hub repository, unless the hub is switched off."""
        if not hub.HF_HUB_OFFLINE:
            super().init_hf_repo(*args, **kwargs)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload model and card, unless the hub is switched off."""
        if hub.HF_HUB_OFFLINE:
            return None
        return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # A checkpoint that is being written will move; it is uploaded afterwards.
        if not hub.HF_HUB_OFFLINE and not self._is_saving:
            super()._push_from_checkpoint(checkpoint_folder)


def _not_saved(final: Path, error: Exception) -> str:
    place = next(path for path in final.absolute().parents if path.is_dir())
    free = shutil.disk_usage(place).free / 1e6
    older = ", ".join(path.name for path in checkpoints_in(final.parent))
    return (
        f"{final.name} could not be saved in {final.parent} ({error}); {free:.0f} MB are free "
        f"there. Checkpoints written before it are untouched: {older or 'there are none'}."
    )
