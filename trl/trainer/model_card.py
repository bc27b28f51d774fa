"""The README of a trained model."""

import re
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..imports import version_of

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
    """Fill the model-card template; names of local folders and files are left out."""
    base_model = _on_hub(base_model)
    dataset_name = _on_hub(dataset_name)
    front_matter = {"base_model": base_model, "datasets": dataset_name}
    base_model_link = f"[{base_model}](https://huggingface.co/{base_model})"
    packages = ("trl", "transformers", "torch", "accelerate", "datasets")
    return Template((TEMPLATES / method.card).read_text("utf-8")).substitute(
        front_matter="".join(f"{name}: {value}\n" for name, value in front_matter.items() if value),
        model_name=model_name,
        base_model=base_model_link if base_model else "a local model",
        dataset=f" on {dataset_name}" if dataset_name else "",
        method=method.name,
        tag=method.tag,
        reference=method.reference,
        versions="\n".join(f"- {package}: {version_of(package)}" for package in packages),
    )


def _on_hub(name: str | None) -> str | None:
    """Return `name` if it can be that of a Hub repository; None for a path of this machine."""
    with suppress(HFValidationError):
        validate_repo_id(name or "")
        return None if Path(str(name)).exists() else name
    return None
