"""The README of a trained model, and the hub, which is left alone when it is switched off."""

import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, ClassVar

from huggingface_hub import constants as hub
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ...imports import version_of

TEMPLATES = resources.files("trl") / "templates"


@dataclass(frozen=True)
class Method:
    """How a trainer is named, and cited if it has a paper: an entry of `templates`, or its own."""

    name: str  # as shown, such as "RLOO"
    tag: str  # as searched for, such as "rloo"
    paper: str = ""  # its title, if `templates` has no entry of it
    arxiv: str = ""  # its identifier
    citation: str = ""  # the entry, in BibTeX, if there is none
    card: str = "model_card.md"  # template of the README

    @property
    def reference(self) -> str:
        """The name, with the paper as Markdown."""
        if not self.arxiv:
            return f"{self.name}."
        entry = TEMPLATES / f"{self.arxiv}.bib"
        citation = entry.read_text("utf-8") if entry.is_file() else self.citation
        titles = [self.paper] if self.paper else re.findall(r"title *= *{(.*?)},\n", citation, re.S)
        title = " ".join(re.sub("[{}]", "", titles[0]).split())
        link = f"[{title}](https://huggingface.co/papers/{self.arxiv})"
        return f"{self.name}: {link}.\n\n```bibtex\n{citation.strip()}\n```"


def render_model_card(
    method: Method, model_name: str, base_model: str | None, dataset_name: str | None
) -> str:
    """Fill the model-card template; what is a local folder or file is left out."""
    base_model, dataset_name = _on_hub(base_model), _on_hub(dataset_name)
    known = {"base_model": base_model, "datasets": dataset_name}
    page = f"[{base_model}](https://huggingface.co/{base_model})"
    packages = ("trl", "transformers", "torch", "accelerate", "datasets")
    return Template((TEMPLATES / method.card).read_text("utf-8")).substitute(
        front_matter="".join(f"{name}: {value}\n" for name, value in known.items() if value),
        model_name=model_name,
        base_model=page if base_model else "a local model",
        dataset=f" on {dataset_name}" if dataset_name else "",
        method=method.name,
        tag=method.tag,
        reference=method.reference,
        versions="\n".join(f"- {package}: {version_of(package)}" for package in packages),
    )


def _on_hub(name: str | None) -> str | None:
    """`name` where it can be one of the hub: a path of this machine means nothing elsewhere."""
    try:
        validate_repo_id(str(name))
    except HFValidationError:
        return None
    return None if name is None or Path(name).exists() else name


class Publishing:
    """What a trainer says of its model: mixed into a `transformers.Trainer`."""

    method: ClassVar[Method]
    args: Any
    model: Any

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        folder: str | Path | None = None,
        **ignored: Any,
    ) -> None:
        """Write `README.md` into a folder, by default the output folder.

        `model_name` is by default the hub id or the folder's name, `dataset_name` what was trained
        on; the trainer's own tags are written, whatever else is given.
        """
        if self.args.process_index == 0:
            name = model_name or Path(self.args.hub_model_id or self.args.output_dir).name
            base_model = self.model.config._name_or_path or None
            card = render_model_card(self.method, name, base_model, dataset_name)
            place = Path(folder or self.args.output_dir)
            place.mkdir(parents=True, exist_ok=True)
            (place / "README.md").write_text(card, encoding="utf-8")

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Create the hub repository, unless the hub is switched off."""
        if not hub.HF_HUB_OFFLINE:
            super().init_hf_repo(*args, **kwargs)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload model and card, unless the hub is switched off."""
        return None if hub.HF_HUB_OFFLINE else super().push_to_hub(*args, **kwargs)
