"""What every trainer of this package adds to `transformers.Trainer`: model card and quiet hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub import constants as hub
from transformers import Trainer

from .model_card import Method, render_model_card


class BaseTrainer(Trainer):
    """A `transformers.Trainer` that writes its own model card and stays silent offline."""

    method: ClassVar[Method]

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

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = f"checkpoint-{self.state.global_step}"
        self._write_card(os.path.join(self._get_output_dir(trial=trial), folder))
        super()._save_checkpoint(model, trial)

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
        if not hub.HF_HUB_OFFLINE:
            super()._push_from_checkpoint(checkpoint_folder)
