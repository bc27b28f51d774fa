"""The README of a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata, resources
from string import Template


@dataclass(frozen=True)
class Method:
    """How a trainer is cited.

    Args:
        name: as shown, such as "RLOO".
        tag: as searched for, such as "rloo".
        paper: title of the paper.
        arxiv: its arXiv identifier.
        citation: BibTeX entry.
    """

    name: str
    tag: str
    paper: str
    arxiv: str
    citation: str


def render_model_card(
    method: Method, model_name: str, base_model: str | None, dataset_name: str | None
) -> str:
    """Fill the model-card template.

    Args:
        method (`Method`): the trainer.
        model_name (`str`): name of the trained model.
        base_model (`str`, *optional*): what was trained.
        dataset_name (`str`, *optional*): on what.
    """
    template = (
        resources.files("trl").joinpath("templates").joinpath("model_card.md").read_text("utf-8")
    )
    versions = "\n".join(
        f"- {package}: {_version(package)}"
        for package in ("trl", "transformers", "torch", "accelerate", "datasets")
    )
    return Template(template).substitute(
        front_matter=_front_matter({"base_model": base_model, "datasets": dataset_name}),
        model_name=model_name,
        base_model=f" of [{base_model}](https://huggingface.co/{base_model})" if base_model else "",
        dataset=f" on {dataset_name}" if dataset_name else "",
        method=method.name,
        tag=method.tag,
        paper=method.paper,
        arxiv=method.arxiv,
        citation=method.citation.strip(),
        versions=versions,
    )


def _front_matter(fields: dict[str, str | None]) -> str:
    return "".join(f"{name}: {value}\n" for name, value in fields.items() if value)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
