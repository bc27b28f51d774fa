"""Hooks of mkdocs: make reference pages from docstrings and options, and formulas in MathML."""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from html import unescape
from pathlib import Path
from pydoc import locate
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from trl.cli.commands import TRAINING
from trl.cli.options import Option, option_groups, options_of

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.DOTALL)
# For each page besides those of trainers, its title and the objects it describes. A dataclass
# is described by a table of its options, any other object by its docstring.
OTHER_PAGES = {
    "models": (
        "Models and scripts",
        (
            "trl.trainer.model_config.ModelConfig",
            "trl.cli.arguments.ScriptArguments",
            "trl.cli.mixture.DatasetMixtureConfig",
            "trl.cli.parser.TrlParser",
            "trl.trainer.model_config.get_peft_config",
            "trl.trainer.model_config.get_quantization_config",
            "trl.models.reference.create_reference_model",
        ),
    ),
    "utilities": (
        "Rewards, data, callbacks",
        (
            "trl.rewards.accuracy.accuracy_reward",
            "trl.rewards.shaping.think_format_reward",
            "trl.rewards.shaping.get_soft_overlong_punishment",
            "trl.cli.mixture.get_dataset",
            "trl.data.packing.pack_dataset",
            "trl.data.packing.truncate_dataset",
            "trl.data.formats.apply_chat_template",
            "trl.data.formats.is_conversational",
            "trl.data.formats.extract_prompt",
            "trl.data.formats.unpair_preference_dataset",
            "trl.data.templates.clone_chat_template",
            "trl.memory.callback.MemoryCallback",
            "trl.trainer.callbacks.BEMACallback",
            "trl.trainer.progress_callbacks.RichProgressCallback",
            "trl.trainer.callbacks.SyncRefModelCallback",
        ),
    ),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference pages and the changelog."""
    for name, text in reference_pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    changelog = Path(config["docs_dir"]).parent / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=text))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Convert formulas to MathML, which browsers show without a script."""
    return FORMULA.sub(_as_mathml, html)


def reference_pages() -> dict[str, str]:
    """Return the text of each page by its name: pages of trainers, and `OTHER_PAGES`."""
    pages = {name: _page(title, paths) for name, (title, paths) in OTHER_PAGES.items()}
    for name, command in TRAINING.items():
        method = command.method
        trainer: Any = locate(method.trainer)
        base = next(base for base in trainer.__bases__ if base.__name__.endswith("Trainer"))
        paths = (method.trainer, f"{base.__module__}.{base.__name__}", method.config)
        pages[name.replace("-", "_")] = _page(trainer.__name__, paths)
    return pages


def _page(title: str, paths: tuple[str, ...]) -> str:
    names = ", ".join(f"`{path.rpartition('.')[2]}`" for path in paths)
    return f"# {title}\n\n{names}\n\n" + "\n\n".join(map(_section, paths)) + "\n"


def _section(path: str) -> str:
    described: Any = locate(path)
    if described is None:
        raise ValueError(f"{path}, which the reference describes, does not exist.")
    if not is_dataclass(described):
        return f"::: {path}"
    name = path.rpartition(".")[2]
    groups = option_groups(options_of(described))  # type: ignore[arg-type]
    tables = [_table(name, title, options) for title, options in groups]
    return f"### {name}\n\n" + "\n\n".join(tables)


def _table(owner: str, title: str, options: list[Option]) -> str:
    rows = "\n".join(map(_row, options))
    heading = f"#### {owner}: {title}\n\n| option | default | |\n| --- | --- | --- |"
    return f"{heading}\n{rows}"


def _row(option: Option) -> str:
    choices = ""
    if option.choices:
        choices = f" One of {', '.join(f'`{choice}`' for choice in option.choices)}."
    help_text = re.sub(r"\s+", " ", option.help).replace("%%", "%").replace("|", "\\|")
    return f"| `{option.name}` | {_default(option)} | {help_text.strip()}{choices} |"


def _default(option: Option) -> str:
    default = option.default
    is_literal = default is None or isinstance(default, (bool, int, float, str, list, dict))
    return f"`{default!r}`".replace("|", "\\|") if is_literal else ""


def _as_mathml(formula: re.Match[str]) -> str:
    display = "block" if formula[1] == "div" else "inline"
    return convert(unescape(formula[2].strip()), display=display)
