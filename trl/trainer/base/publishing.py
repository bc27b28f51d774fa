"""The model card of a trained model, and the hub, which is left alone when it is switched off."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub import constants as hub

from .model_card import Method, write_model_card


class Publishing:
    """What a trainer says of its model: mixed into a `transformers.Trainer`."""

    method: ClassVar[Method]
    args: Any
    model: Any

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, **ignored: Any
    ) -> None:
        """Write `README.md` into the output folder.

        Args:
            model_name (`str`, *optional*): defaults to the hub id or the folder's name.
            dataset_name (`str`, *optional*): what was trained on.
            ignored: accepted for compatibility; the trainer's own tags are written.
        """
        self._write_card(self.args.output_dir, model_name, dataset_name)

    def _write_card(
        self, folder: str | Path, model_name: str | None = None, dataset_name: str | None = None
    ) -> None:
        if self.args.process_index == 0:
            name = model_name or Path(self.args.hub_model_id or self.args.output_dir).name
            base_model = self.model.config._name_or_path or None
            write_model_card(Path(folder), self.method, name, base_model, dataset_name)

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Create the hub repository, unless the hub is switched off."""
        if not hub.HF_HUB_OFFLINE:
            super().init_hf_repo(*args, **kwargs)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload model and card, unless the hub is switched off."""
        return None if hub.HF_HUB_OFFLINE else super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not hub.HF_HUB_OFFLINE:
            super()._push_from_checkpoint(checkpoint_folder)
